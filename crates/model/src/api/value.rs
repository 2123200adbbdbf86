//! Values of Istio's API, parsed as Istio does (protobuf JSON, Go durations).

use std::{fmt, time};

use serde::{
    Deserialize, Deserializer,
    de::{Error, MapAccess, Unexpected, Visitor},
};

use super::Labels;
use crate::go_duration;

/// Duration, written as in Go: `1.5s`, `250ms`, `1h30m`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Duration(pub time::Duration);

/// Match of a text.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum StringMatch {
    /// `{}`: the value need only be present (headers only).
    Present,
    /// Equal text.
    Exact(String),
    /// Prefix.
    Prefix(String),
    /// RE2 expression that must match the whole text.
    Regex(String),
}

/// Percentage, `{value: 12.5}`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Deserialize)]
#[serde(default)]
pub struct Percent {
    /// From 0 to 100.
    pub value: f64,
}

/// Workloads that have certain labels, `{labels: {app: web}}`. Source: `istio.networking.v1.WorkloadSelector`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub struct WorkloadLabels {
    /// Labels; all must match.
    pub labels: Labels,
}

/// Port, `{number: 9080}`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub struct PortSelector {
    /// Service port.
    pub number: u32,
}

impl Duration {
    /// Zero; disables a timeout.
    pub const ZERO: Self = Self(time::Duration::ZERO);

    /// Parses a duration as Go's `time.ParseDuration` does, but refuses negative ones.
    pub fn parse(text: &str) -> Option<Self> {
        go_duration::parse(text).map(Self)
    }
}

impl fmt::Display for Duration {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}", self.0)
    }
}

impl<'de> Deserialize<'de> for Duration {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Text;
        impl Visitor<'_> for Text {
            type Value = Duration;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a duration such as \"1.5s\", \"250ms\" or \"1m\"")
            }

            fn visit_str<E: Error>(self, text: &str) -> Result<Duration, E> {
                Duration::parse(text).ok_or_else(|| E::invalid_value(Unexpected::Str(text), &self))
            }
        }
        deserializer.deserialize_any(Text)
    }
}

/// Returns whether a text can be the name of a header. Source: RFC 9110, section 5.6.2.
pub(crate) fn is_header_name(name: &str) -> bool {
    let is_token = |byte: u8| byte.is_ascii_alphanumeric() || b"!#$%&'*+-.^_`|~".contains(&byte);
    !name.is_empty() && name.bytes().all(is_token)
}

impl StringMatch {
    /// Returns the text to compare with; empty for [`Self::Present`].
    pub fn text(&self) -> &str {
        match self {
            Self::Present => "",
            Self::Exact(text) | Self::Prefix(text) | Self::Regex(text) => text,
        }
    }
}

impl<'de> Deserialize<'de> for StringMatch {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct StringMatchVisitor;
        impl<'de> Visitor<'de> for StringMatchVisitor {
            type Value = StringMatch;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("one of {exact: TEXT}, {prefix: TEXT}, {regex: TEXT}")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
                let mut found = StringMatch::Present;
                while let Some(key) = map.next_key::<String>()? {
                    let text = map.next_value()?;
                    if found != StringMatch::Present {
                        return Err(A::Error::custom("has more than one of exact, prefix and regex"));
                    }
                    found = match key.as_str() {
                        "exact" => StringMatch::Exact(text),
                        "prefix" => StringMatch::Prefix(text),
                        "regex" => StringMatch::Regex(text),
                        _ => return Err(A::Error::unknown_field(&key, &["exact", "prefix", "regex"])),
                    };
                }
                Ok(found)
            }
        }
        deserializer.deserialize_struct("StringMatch", &["exact", "prefix", "regex"], StringMatchVisitor)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn durations_are_parsed_as_in_go() {
        let millis = |text: &str| Duration::parse(text).map(|d| d.0.as_millis());
        assert_eq!(millis("1.5s"), Some(1500));
        assert_eq!(millis("250ms"), Some(250));
        assert_eq!(millis("1h30m"), Some(5_400_000));
        assert_eq!(millis("0s"), Some(0));
        assert_eq!(millis("0"), Some(0));
        for bad in ["", "5", "s", "-1s", "1 s", "1.2.3s", "1d", "1e9s", "99999999999999999999h"] {
            assert_eq!(Duration::parse(bad), None, "{bad}");
        }
    }
}
