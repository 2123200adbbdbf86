//! Compiled matchers of strings, headers and metadata.
//!
//! Source: `envoy.type.matcher.v3.StringMatcher`, `envoy.config.route.v3.HeaderMatcher`.

use regex::bytes::Regex;

/// A match of a string. Source: `envoy.type.matcher.v3.StringMatcher`.
#[derive(Clone, Debug)]
pub enum TextMatch {
    /// The whole string.
    Exact(Box<[u8]>),
    /// A prefix.
    Prefix(Box<[u8]>),
    /// A suffix.
    Suffix(Box<[u8]>),
    /// A substring.
    Contains(Box<[u8]>),
    /// A regular expression for the whole string, anchored when compiled.
    Regex(Regex),
    /// The inner match without regard to ASCII case. The pattern is in lower case. A regex stays case-sensitive.
    IgnoreCase(Box<TextMatch>),
}

/// A match of the headers with one name. [`Values`](crate::matching::Values) determines how several values count.
#[derive(Clone, Debug)]
pub struct HeaderMatch {
    /// Header name in lower case. `:method`, `:path`, `:authority` and `:scheme` are parts of the request line.
    pub name: Box<str>,
    /// Test of the value.
    pub test: HeaderTest,
    /// The result is inverted.
    pub invert: bool,
    /// A missing header is treated as an empty one.
    pub missing_as_empty: bool,
}

/// Test of a header.
#[derive(Clone, Debug)]
pub enum HeaderTest {
    /// The header is present (`true`) or absent (`false`).
    Present(bool),
    /// The value as a string.
    Value(TextMatch),
    /// The value as an integer in a range, end exclusive.
    Range(i64, i64),
}

/// A match of dynamic metadata. Source: `envoy.type.matcher.v3.MetadataMatcher`.
#[derive(Clone, Debug)]
pub struct MetadataMatch {
    /// Name of the filter that set the metadata, then the keys of the value.
    pub path: Vec<Box<str>>,
    /// Test of the value.
    pub test: ValueMatch,
    /// The result is inverted.
    pub invert: bool,
}

/// A match of a metadata value. Source: `envoy.type.matcher.v3.ValueMatcher`.
#[derive(Clone, Debug)]
pub enum ValueMatch {
    /// Null.
    Null,
    /// This number.
    Number(f64),
    /// A number in a range, end exclusive.
    Range(f64, f64),
    /// A string.
    Text(TextMatch),
    /// A boolean.
    Bool(bool),
    /// The value is present. `false` never matches, as in Envoy; an inverted match tests for absence.
    Present(bool),
    /// A list with a value that matches.
    List(Box<ValueMatch>),
    /// One of these matches.
    OneOf(Vec<ValueMatch>),
}
