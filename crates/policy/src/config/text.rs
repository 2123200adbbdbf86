//! Matchers of text and of headers, compiled.
//!
//! Source: `envoy.type.matcher.v3.StringMatcher`, `envoy.config.route.v3.HeaderMatcher`.

use regex::bytes::Regex;

/// A test of one text.
#[derive(Clone, Debug)]
pub enum TextMatch {
    /// The whole text.
    Exact(Box<[u8]>),
    /// Its beginning.
    Prefix(Box<[u8]>),
    /// Its end.
    Suffix(Box<[u8]>),
    /// Any part of it.
    Contains(Box<[u8]>),
    /// The whole text against a regular expression (already anchored when compiled).
    Regex(Regex),
    /// As the inner match, without regard to ASCII case (the pattern is kept in lower case).
    IgnoreCase(Box<TextMatch>),
}

/// A test of the headers of one name: one of several values must pass.
#[derive(Clone, Debug)]
pub struct HeaderMatch {
    /// Header name in lower case. `:method`, `:path`, `:authority` and `:scheme` stand for parts of the request line.
    pub name: Box<str>,
    /// What must hold.
    pub test: HeaderTest,
    /// The outcome is turned round.
    pub invert: bool,
    /// A missing header counts as an empty one.
    pub missing_as_empty: bool,
}

/// What a header must be.
#[derive(Clone, Debug)]
pub enum HeaderTest {
    /// There (`true`) or not there (`false`).
    Present(bool),
    /// Its value as text.
    Value(TextMatch),
    /// Its value as a number, from inclusive to exclusive.
    Range(i64, i64),
}

/// A test of what a filter before found out. Source: `envoy.type.matcher.v3.MetadataMatcher`.
#[derive(Clone, Debug)]
pub struct MetadataMatch {
    /// The filter's name, then the keys that lead to the value.
    pub path: Vec<Box<str>>,
    /// What the value must be.
    pub test: ValueMatch,
    /// The outcome is turned round.
    pub invert: bool,
}

/// A test of a value. Source: `envoy.type.matcher.v3.ValueMatcher`.
#[derive(Clone, Debug)]
pub enum ValueMatch {
    /// Null.
    Null,
    /// This number.
    Number(f64),
    /// A number from inclusive to exclusive.
    Range(f64, f64),
    /// A text.
    Text(TextMatch),
    /// True or false.
    Bool(bool),
    /// There. With `false` it never passes, as in Envoy; absence is asked for by turning it round.
    Present(bool),
    /// A list, one of whose values passes.
    List(Box<ValueMatch>),
    /// One of these.
    OneOf(Vec<ValueMatch>),
}
