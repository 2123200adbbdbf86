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

/// A test of the headers of one name; several values are joined by `,` before the test.
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
