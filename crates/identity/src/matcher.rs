//! Accepted names of a peer's certificate, in the terms of Envoy's `match_typed_subject_alt_names`.

use std::fmt;

use crate::peer::Peer;

/// Kind of subject alternative name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum SanKind {
    /// Every kind.
    Any,
    /// URIs, including SPIFFE IDs.
    Uri,
    /// DNS names. With [`Pattern::Exact`], case is ignored, and a name like `*.example.com` in the certificate
    /// matches as in RFC 6125.
    Dns,
    /// IP addresses.
    Ip,
    /// Mail addresses.
    Email,
}

/// Condition on a name.
#[derive(Clone, Debug)]
pub enum Pattern {
    /// Equal to the text.
    Exact(String),
    /// Begins with the text.
    Prefix(String),
    /// Ends with the text.
    Suffix(String),
    /// Contains the text.
    Contains(String),
    /// Matches the regular expression, which is anchored ([`skysail_core::re2::compile_whole`]).
    Regex(regex::bytes::Regex),
}

/// An accepted name.
#[derive(Clone, Debug)]
pub struct NameMatch {
    /// Kind of name to compare.
    pub kind: SanKind,
    /// Condition that one of the names must meet.
    pub pattern: Pattern,
    /// Ignores ASCII case; has no effect on [`Pattern::Regex`].
    pub ignore_case: bool,
}

impl NameMatch {
    /// Returns a match for a URI equal to `uri`, such as a SPIFFE ID.
    pub fn uri(uri: impl Into<String>) -> Self {
        Self { kind: SanKind::Uri, pattern: Pattern::Exact(uri.into()), ignore_case: false }
    }

    /// Returns a match for URIs that begin with `prefix`, such as `spiffe://cluster.local/`.
    pub fn uri_prefix(prefix: impl Into<String>) -> Self {
        Self { kind: SanKind::Uri, pattern: Pattern::Prefix(prefix.into()), ignore_case: false }
    }

    /// Returns whether a name of the peer matches.
    pub fn matches(&self, peer: &Peer) -> bool {
        let any = |names: &[String]| names.iter().any(|name| self.pattern.matches(name, self.ignore_case));
        let dns = || peer.dns.iter().any(|name| self.matches_dns(name));
        let ip = || peer.ips.iter().any(|ip| self.pattern.matches(&ip.to_string(), self.ignore_case));
        match self.kind {
            SanKind::Any => any(&peer.uris) || dns() || ip() || any(&peer.emails),
            SanKind::Uri => any(&peer.uris),
            SanKind::Dns => dns(),
            SanKind::Ip => ip(),
            SanKind::Email => any(&peer.emails),
        }
    }

    /// Returns whether a DNS name matches. With an exact pattern, case is ignored and the certificate may have a
    /// wildcard, as in Envoy.
    fn matches_dns(&self, name: &str) -> bool {
        match &self.pattern {
            Pattern::Exact(wanted) => is_dns_name(name, wanted),
            pattern => pattern.matches(name, self.ignore_case),
        }
    }
}

/// Returns whether a DNS name of a certificate, such as `*.example.com`, covers `wanted` (RFC 6125, section
/// 6.4.3). The first label may contain one asterisk, unless it is an A-label.
pub(crate) fn is_dns_name(name: &str, wanted: &str) -> bool {
    let (name, wanted) = (name.to_ascii_lowercase(), wanted.to_ascii_lowercase());
    if name == wanted {
        return true;
    }
    let (Some((first, rest)), Some((label, domain))) = (name.split_once('.'), wanted.split_once('.')) else {
        return false;
    };
    let Some((begin, end)) = first.split_once('*') else { return false };
    rest == domain
        && !rest.contains('*')
        && !end.contains('*')
        && !first.starts_with("xn--")
        && label.len() >= (begin.len() + end.len()).max(1)
        && label.starts_with(begin)
        && label.ends_with(end)
}

impl Pattern {
    fn matches(&self, name: &str, ignore_case: bool) -> bool {
        if let Self::Regex(regex) = self {
            return regex.is_match(name.as_bytes());
        }
        let lower = |text: &str| if ignore_case { text.to_ascii_lowercase() } else { text.to_owned() };
        let name = lower(name);
        match self {
            Self::Exact(text) => name == lower(text),
            Self::Prefix(text) => name.starts_with(&lower(text)),
            Self::Suffix(text) => name.ends_with(&lower(text)),
            Self::Contains(text) => name.contains(&lower(text)),
            Self::Regex(_) => false,
        }
    }
}

impl fmt::Display for NameMatch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.pattern {
            Pattern::Exact(text) => write!(f, "{text}"),
            Pattern::Prefix(text) => write!(f, "{text}*"),
            Pattern::Suffix(text) => write!(f, "*{text}"),
            Pattern::Contains(text) => write!(f, "*{text}*"),
            Pattern::Regex(regex) => write!(f, "/{regex}/"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn matches(kind: SanKind, pattern: Pattern, peer: &Peer) -> bool {
        NameMatch { kind, pattern, ignore_case: false }.matches(peer)
    }

    #[test]
    fn names_match_by_kind_and_pattern() {
        let id = "spiffe://cluster.local/ns/a/sa/b";
        let peer = Peer {
            uris: vec![id.into()],
            dns: vec!["*.Example.com".into(), "plain.test".into()],
            ips: vec![[10, 0, 0, 1].into()],
            ..Peer::default()
        };
        assert!(NameMatch::uri(id).matches(&peer));
        assert!(!NameMatch::uri("spiffe://cluster.local/ns/a/sa/bb").matches(&peer));
        assert!(NameMatch::uri_prefix("spiffe://cluster.local/").matches(&peer));
        assert!(!matches(SanKind::Dns, Pattern::Prefix("spiffe".into()), &peer));
        assert!(matches(SanKind::Dns, Pattern::Exact("www.example.com".into()), &peer));
        assert!(!matches(SanKind::Dns, Pattern::Exact("a.www.example.com".into()), &peer));
        assert!(!matches(SanKind::Dns, Pattern::Exact("example.com".into()), &peer));
        assert!(!matches(SanKind::Dns, Pattern::Exact(".example.com".into()), &peer));
        assert!(matches(SanKind::Any, Pattern::Suffix(".test".into()), &peer));
        assert!(matches(SanKind::Ip, Pattern::Exact("10.0.0.1".into()), &peer));
        assert!(matches(SanKind::Uri, Pattern::Contains("/ns/a/".into()), &peer));
        let regex = |text| Pattern::Regex(skysail_core::re2::compile_whole(text).unwrap());
        assert!(matches(SanKind::Uri, regex("spiffe://.*/sa/b"), &peer));
        assert!(!matches(SanKind::Uri, regex("spiffe://.*/sa/"), &peer), "a regex must match the whole name");
    }
}
