//! Translates matchers and formats.

use std::{
    collections::BTreeSet,
    sync::{Mutex, PoisonError},
};

use regex::bytes::Regex;
use skysail_core::re2;
use skysail_xds::envoy::pb::envoy::{
    config::route::v3::{HeaderMatcher, QueryParameterMatcher, header_matcher, query_parameter_matcher},
    r#type::{
        matcher::v3::{
            MetadataMatcher, PathMatcher, RegexMatchAndSubstitute, StringMatcher, ValueMatcher,
            double_matcher, list_matcher, metadata_matcher, path_matcher, string_matcher::MatchPattern,
            value_matcher,
        },
        v3::{FractionalPercent, fractional_percent::DenominatorType},
    },
};
use tracing::warn;

use super::{At as _, Reject, Result};
use skysail_policy::config::{
    http::{Format, Part},
    route::QueryMatch,
    text::{HeaderMatch, HeaderTest, MetadataMatch, TextMatch, ValueMatch},
};
use skysail_policy::operators::{self, Operator, OperatorSupport, Piece};

/// Translates a string matcher.
pub(super) fn text(proto: &StringMatcher) -> Result<TextMatch> {
    let fold = |text: &str| -> Box<[u8]> {
        let text = if proto.ignore_case { text.to_ascii_lowercase() } else { text.to_owned() };
        text.into_bytes().into()
    };
    let inner = match &proto.match_pattern {
        Some(MatchPattern::Exact(text)) => TextMatch::Exact(fold(text)),
        Some(MatchPattern::Prefix(text)) => TextMatch::Prefix(fold(text)),
        Some(MatchPattern::Suffix(text)) => TextMatch::Suffix(fold(text)),
        Some(MatchPattern::Contains(text)) => TextMatch::Contains(fold(text)),
        // Envoy has no case folding for regular expressions either.
        Some(MatchPattern::SafeRegex(pattern)) => return Ok(TextMatch::Regex(anchored(&pattern.regex)?)),
        Some(MatchPattern::Custom(_)) => return Err(Reject::new("custom string matchers are not supported")),
        None => return Err(Reject::new("a string matcher must contain a pattern")),
    };
    Ok(if proto.ignore_case { TextMatch::IgnoreCase(Box::new(inner)) } else { inner })
}

/// Translates the matcher of a path matcher.
pub(super) fn path(proto: &PathMatcher) -> Result<TextMatch> {
    match &proto.rule {
        Some(path_matcher::Rule::Path(matcher)) => text(matcher).at("path"),
        None => Err(Reject::new("a path matcher must contain a pattern")),
    }
}

/// Compiles a regular expression that must match the whole text.
pub(super) fn anchored(pattern: &str) -> Result<Regex> {
    re2::compile_whole(pattern).map_err(|error| unusable(pattern, &error))
}

/// Compiles a regular expression that may match any part of the text.
pub(super) fn unanchored(pattern: &str) -> Result<Regex> {
    re2::compile(pattern).map_err(|error| unusable(pattern, &error))
}

fn unusable(pattern: &str, error: &str) -> Reject {
    Reject::new(format!("the regular expression {pattern:?} cannot be used: {error}"))
}

/// Translates a pattern with its substitution, in which `\1` is a group.
pub(super) fn substitution(proto: &RegexMatchAndSubstitute) -> Result<(Regex, Box<str>)> {
    let pattern = proto.pattern.as_ref().ok_or_else(|| Reject::new("a rewrite needs a pattern"))?;
    Ok((unanchored(&pattern.regex).at("pattern")?, proto.substitution.as_str().into()))
}

/// Translates a header matcher.
#[expect(deprecated, reason = "older control planes and files still use the older fields")]
pub(super) fn header(proto: &HeaderMatcher) -> Result<HeaderMatch> {
    use header_matcher::HeaderMatchSpecifier as Spec;
    let bytes = |text: &str| -> Box<[u8]> { text.as_bytes().into() };
    let test = match &proto.header_match_specifier {
        None => HeaderTest::Present(true),
        Some(Spec::PresentMatch(present)) => HeaderTest::Present(*present),
        Some(Spec::ExactMatch(value)) => HeaderTest::Value(TextMatch::Exact(bytes(value))),
        Some(Spec::PrefixMatch(value)) => HeaderTest::Value(TextMatch::Prefix(bytes(value))),
        Some(Spec::SuffixMatch(value)) => HeaderTest::Value(TextMatch::Suffix(bytes(value))),
        Some(Spec::ContainsMatch(value)) => HeaderTest::Value(TextMatch::Contains(bytes(value))),
        Some(Spec::SafeRegexMatch(value)) => {
            HeaderTest::Value(TextMatch::Regex(anchored(&value.regex).at("safe_regex_match")?))
        }
        Some(Spec::StringMatch(value)) => HeaderTest::Value(text(value).at("string_match")?),
        Some(Spec::RangeMatch(range)) => HeaderTest::Range(range.start, range.end),
    };
    if proto.name.is_empty() {
        return Err(Reject::new("a header matcher needs the name of a header"));
    }
    Ok(HeaderMatch {
        name: proto.name.to_ascii_lowercase().into(),
        test,
        invert: proto.invert_match,
        missing_as_empty: proto.treat_missing_header_as_empty,
    })
}

/// Translates a list of header matchers.
pub(super) fn headers(protos: &[HeaderMatcher]) -> Result<Vec<HeaderMatch>> {
    protos
        .iter()
        .enumerate()
        .map(|(index, proto)| header(proto).at(format_args!("headers[{index}]")))
        .collect()
}

/// Translates a query parameter matcher.
pub(super) fn query(proto: &QueryParameterMatcher) -> Result<QueryMatch> {
    use query_parameter_matcher::QueryParameterMatchSpecifier as Spec;
    let value = match &proto.query_parameter_match_specifier {
        Some(Spec::StringMatch(matcher)) => Some(text(matcher).at("string_match")?),
        Some(Spec::PresentMatch(true)) | None => None,
        Some(Spec::PresentMatch(false)) => {
            return Err(Reject::new("present_match must be true: absence cannot be matched"));
        }
    };
    Ok(QueryMatch { name: proto.name.as_str().into(), value })
}

/// Translates a metadata matcher.
pub(super) fn metadata(proto: &MetadataMatcher) -> Result<MetadataMatch> {
    let keys = proto.path.iter().map(|segment| match &segment.segment {
        Some(metadata_matcher::path_segment::Segment::Key(key)) => Ok(key.as_str().into()),
        None => Err(Reject::new("every segment must be a key").at_field("path")),
    });
    let path = std::iter::once(Ok(proto.filter.as_str().into())).chain(keys).collect::<Result<_>>()?;
    let test = proto.value.as_ref().ok_or_else(|| Reject::new("must be given").at_field("value"))?;
    Ok(MetadataMatch { path, test: value(test).at("value")?, invert: proto.invert })
}

fn value(proto: &ValueMatcher) -> Result<ValueMatch> {
    use value_matcher::MatchPattern as Pattern;
    let missing = || Reject::new("must contain a pattern");
    Ok(match proto.match_pattern.as_ref().ok_or_else(missing)? {
        Pattern::NullMatch(_) => ValueMatch::Null,
        Pattern::BoolMatch(wanted) => ValueMatch::Bool(*wanted),
        Pattern::PresentMatch(wanted) => ValueMatch::Present(*wanted),
        Pattern::StringMatch(matcher) => ValueMatch::Text(text(matcher).at("string_match")?),
        Pattern::DoubleMatch(matcher) => match matcher.match_pattern.as_ref().ok_or_else(missing)? {
            double_matcher::MatchPattern::Exact(number) => ValueMatch::Number(*number),
            double_matcher::MatchPattern::Range(range) => ValueMatch::Range(range.start, range.end),
        },
        Pattern::ListMatch(matcher) => match matcher.match_pattern.as_ref().ok_or_else(missing)? {
            list_matcher::MatchPattern::OneOf(one) => {
                ValueMatch::List(Box::new(value(one).at("list_match.one_of")?))
            }
        },
        Pattern::OrMatch(matcher) => {
            let some = matcher.value_matchers.iter().map(value).collect::<Result<_>>();
            ValueMatch::OneOf(some.at("or_match.value_matchers")?)
        }
    })
}

/// Returns a fraction in millionths, at most 1,000,000.
pub(super) fn millionths(proto: &FractionalPercent) -> u32 {
    let scale = match proto.denominator() {
        DenominatorType::Hundred => 10_000,
        DenominatorType::TenThousand => 100,
        DenominatorType::Million => 1,
    };
    proto.numerator.saturating_mul(scale).min(1_000_000)
}

/// Parses a text with operators such as `%REQ(NAME)%`.
pub(crate) fn format(text: &str) -> Result<Format> {
    format_of(text, |operator| {
        let Operator { name, .. } = operator;
        match operator.support() {
            OperatorSupport::All => Ok(true),
            _ => Err(Reject::new(format!("{text:?}: the operator %{name}% is not supported"))),
        }
    })
}

/// Parses a format of an access log. An operator that only Envoy has is written like a missing value.
pub(super) fn lenient_format(text: &str) -> Result<Format> {
    format_of(text, |operator| {
        let Operator { name, .. } = operator;
        match operator.support() {
            OperatorSupport::All => Ok(true),
            OperatorSupport::EnvoyOnly => {
                if UNSUPPORTED.lock().unwrap_or_else(PoisonError::into_inner).insert((*name).to_owned()) {
                    warn!("access logs do not have the values of %{name}%: the operator is not supported");
                }
                Ok(false)
            }
            OperatorSupport::Unknown => {
                Err(Reject::new(format!("{text:?}: the operator %{name}% does not exist")))
            }
        }
    })
}

/// Names of operators that were reported. They are names that Envoy has, so their number is limited.
static UNSUPPORTED: Mutex<BTreeSet<String>> = Mutex::new(BTreeSet::new());

/// Parses a text. `supports` returns false for an operator whose value is always missing.
fn format_of(text: &str, supports: impl Fn(&Operator<'_>) -> Result<bool>) -> Result<Format> {
    let mut parts: Vec<Part> = Vec::new();
    let mut plain = String::new();
    for piece in operators::parse(text).map_err(|error| Reject::new(format!("{text:?}: {error}")))? {
        match piece {
            Piece::Text(text) => plain.push_str(text),
            Piece::Operator(operator) => {
                let name = if supports(&operator)? { operator.name } else { Part::MISSING };
                if !plain.is_empty() {
                    parts.push(Part::Text(std::mem::take(&mut plain).into()));
                }
                let Operator { argument, max_len, .. } = operator;
                parts.push(Part::Operator { name: name.into(), argument: argument.map(Into::into), max_len });
            }
        }
    }
    if !plain.is_empty() {
        parts.push(Part::Text(plain.into()));
    }
    Ok(Format { parts })
}
