//! `--suppress`: findings that are not reported.

use std::str::FromStr;

use skysail_model::{Code, Diagnostic};

/// Findings with a code, about all objects or about those that a pattern matches.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Suppression {
    codes: Vec<Code>,
    /// Kind, name and namespace, with `*` for any text; `None` for all objects.
    object: Option<[String; 3]>,
}

impl FromStr for Suppression {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (code, object) = match text.split_once('=') {
            Some((code, object)) => (code, Some(object)),
            None => (text, None),
        };
        let of_istio = |known: &&Code| known.istio().iter().any(|istio| istio.eq_ignore_ascii_case(code));
        let codes = match code.parse() {
            Ok(code) => vec![code],
            Err(_) => Code::ALL.iter().filter(of_istio).copied().collect(),
        };
        if codes.is_empty() {
            return Err(format!("unknown code {code}; docs/analysis.md lists the codes"));
        }
        let Some(object) = object else { return Ok(Self { codes, object: None }) };
        let wrong = || "write CODE=KIND NAME.NAMESPACE, such as \"SKY0613=Gateway web.edge\"".to_owned();
        let (kind, name) = object.trim().split_once(' ').ok_or_else(wrong)?;
        // Names may have dots, namespaces have none. Objects without a namespace have an empty one.
        let (name, namespace) = name.trim().rsplit_once('.').unwrap_or((name.trim(), "*"));
        if kind.is_empty() || name.is_empty() {
            return Err(wrong());
        }
        Ok(Self { codes, object: Some([kind, name, namespace].map(ToOwned::to_owned)) })
    }
}

impl Suppression {
    /// Returns whether a finding is not reported.
    pub(super) fn covers(&self, finding: &Diagnostic) -> bool {
        if !self.codes.contains(&finding.code) {
            return false;
        }
        let Some([kind, name, namespace]) = &self.object else { return true };
        let (of_kind, key) = finding.object.split_once(' ').unwrap_or_default();
        let (of_namespace, of_name) = key.split_once('/').unwrap_or(("", key));
        [(kind, of_kind), (name, of_name), (namespace, of_namespace)]
            .iter()
            .all(|(pattern, text)| matches(pattern, text))
    }
}

/// Returns whether a pattern with `*` for any text matches.
fn matches(pattern: &str, text: &str) -> bool {
    let mut parts = pattern.split('*');
    let Some(mut rest) = text.strip_prefix(parts.next().unwrap_or_default()) else { return false };
    let parts: Vec<&str> = parts.collect();
    let Some((last, inner)) = parts.split_last() else { return rest.is_empty() };
    for part in inner {
        match rest.find(part) {
            Some(at) => rest = &rest[at + part.len()..],
            None => return false,
        }
    }
    rest.ends_with(last)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn patterns_match_whole_texts() {
        for (pattern, text, expected) in [
            ("*", "", true),
            ("a", "a", true),
            ("a", "ab", false),
            ("a*", "ab", true),
            ("*b", "ab", true),
            ("a*c*e", "abcde", true),
            ("a*c*e", "abde", false),
            ("a*a", "a", false),
        ] {
            assert_eq!(matches(pattern, text), expected, "{pattern} {text}");
        }
    }

    #[test]
    fn codes_and_objects_are_suppressed() {
        let mut finding = Diagnostic::new(Code::SelectsNothing, "f", 1, "m");
        finding.object = "Gateway edge/web.a".to_owned();
        let covers = |text: &str| text.parse::<Suppression>().map(|of| of.covers(&finding));
        assert_eq!(covers("SKY0613"), Ok(true));
        assert_eq!(covers("IST0127"), Ok(true));
        assert_eq!(covers("SKY0601"), Ok(false));
        assert_eq!(covers("SelectsNothing=Gateway web.a.edge"), Ok(true));
        assert_eq!(covers("SKY0613=* *.edge"), Ok(true));
        assert_eq!(covers("SKY0613=Gateway *.other"), Ok(false));
        assert!(covers("SKY9999").is_err() && covers("SKY0613=Gateway").is_err());
    }
}
