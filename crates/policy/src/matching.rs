//! Evaluation of string, header and metadata matches. Routes, policies, faults and CORS share it.
//!
//! Nothing is allocated, except for substring matches without regard to case.

use serde_json::{Map, Value};

use crate::config::text::{HeaderMatch, HeaderTest, MetadataMatch, TextMatch, ValueMatch};
use skysail_http::head::{Headers, RequestHead, ResponseHead};

/// Returns whether a string matches.
pub fn text(test: &TextMatch, value: &[u8]) -> bool {
    match test {
        TextMatch::Exact(whole) => value == &**whole,
        TextMatch::Prefix(start) => value.starts_with(start),
        TextMatch::Suffix(end) => value.ends_with(end),
        TextMatch::Contains(part) => contains(value, part),
        TextMatch::Regex(regex) => regex.is_match(value),
        TextMatch::IgnoreCase(inner) => ignoring_case(inner, value),
    }
}

fn ignoring_case(test: &TextMatch, value: &[u8]) -> bool {
    match test {
        TextMatch::Exact(whole) => value.eq_ignore_ascii_case(whole),
        TextMatch::Prefix(start) => {
            value.get(..start.len()).is_some_and(|part| part.eq_ignore_ascii_case(start))
        }
        TextMatch::Suffix(end) => {
            value.len().checked_sub(end.len()).is_some_and(|from| value[from..].eq_ignore_ascii_case(end))
        }
        TextMatch::Contains(part) => contains(&value.to_ascii_lowercase(), part),
        TextMatch::Regex(_) => text(test, value),
        TextMatch::IgnoreCase(inner) => ignoring_case(inner, value),
    }
}

fn contains(value: &[u8], part: &[u8]) -> bool {
    memchr::memmem::find(value, part).is_some()
}

/// Rule for a header with several values.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Values {
    /// Envoy's rule: one value matches; an inverted match holds if no value matches.
    One,
    /// One value matches, inverted or not. For rules that refuse.
    Any,
    /// Every value matches, inverted or not. For rules that allow.
    Every,
}

/// Returns whether a request header matches, by [`Values::One`].
pub fn header(test: &HeaderMatch, head: &RequestHead) -> bool {
    header_values(test, head, Values::One)
}

/// Returns whether a request header matches, by the given rule for several values.
pub fn header_values(test: &HeaderMatch, head: &RequestHead, values: Values) -> bool {
    field(test, head.pseudo_header(&test.name), head, values)
}

/// Returns whether a response header matches.
pub fn response_header(test: &HeaderMatch, head: &ResponseHead) -> bool {
    field(test, None, head, Values::One)
}

/// Returns whether a header matches. `apart` is the value of a header that is not among the fields, such as `:path`.
fn field(test: &HeaderMatch, apart: Option<&str>, headers: &Headers, values: Values) -> bool {
    let passes = |value: &[u8]| match &test.test {
        HeaderTest::Present(wanted) => *wanted,
        HeaderTest::Value(test) => text(test, value),
        HeaderTest::Range(from, to) => {
            let number = std::str::from_utf8(value).ok().and_then(|text| text.parse::<i64>().ok());
            number.is_some_and(|number| (*from..*to).contains(&number))
        }
    };
    match apart {
        Some(value) => passes(value.as_bytes()) != test.invert,
        None if headers.has(&test.name) => {
            let mut all = headers.header_values(&test.name).map(passes);
            match values {
                Values::One => all.any(|passes| passes) != test.invert,
                Values::Any => all.any(|passes| passes != test.invert),
                Values::Every => all.all(|passes| passes != test.invert),
            }
        }
        None if test.missing_as_empty => passes(b"") != test.invert,
        // A missing header matches only a test for its absence. An inverted test of its value does not match.
        None => matches!(test.test, HeaderTest::Present(wanted) if wanted == test.invert),
    }
}

/// Returns whether all headers match.
pub fn headers(tests: &[HeaderMatch], head: &RequestHead) -> bool {
    tests.iter().all(|test| header(test, head))
}

/// Returns whether dynamic metadata match.
pub fn metadata(test: &MetadataMatch, metadata: Option<&Map<String, Value>>) -> bool {
    value(&test.test, metadata_value(&test.path, metadata)) != test.invert
}

/// Adds a filter's dynamic metadata. A value replaces an earlier one with the same key, as in Envoy.
pub fn merge_metadata(
    known: &mut Map<String, Value>,
    filter: &str,
    found: impl IntoIterator<Item = (String, Value)>,
) {
    let mut found = found.into_iter().peekable();
    if found.peek().is_some()
        && let Value::Object(before) = known.entry(filter).or_insert_with(|| Map::new().into())
    {
        before.extend(found);
    }
}

/// Returns dynamic metadata by path. The first part of the path is the name of the filter.
pub fn metadata_value<'a>(path: &[Box<str>], metadata: Option<&'a Map<String, Value>>) -> Option<&'a Value> {
    let (filter, keys) = path.split_first()?;
    keys.iter().try_fold(metadata?.get(&**filter)?, |value, key| value.get(&**key))
}

fn value(test: &ValueMatch, found: Option<&Value>) -> bool {
    match test {
        ValueMatch::Present(wanted) => *wanted && found.is_some(),
        ValueMatch::Null => found.is_some_and(Value::is_null),
        ValueMatch::Bool(wanted) => found.and_then(Value::as_bool) == Some(*wanted),
        ValueMatch::Number(wanted) => found.and_then(Value::as_f64) == Some(*wanted),
        ValueMatch::Range(from, to) => {
            found.and_then(Value::as_f64).is_some_and(|number| (*from..*to).contains(&number))
        }
        ValueMatch::Text(test) => {
            found.and_then(Value::as_str).is_some_and(|found| text(test, found.as_bytes()))
        }
        ValueMatch::List(test) => {
            let list = found.and_then(Value::as_array);
            list.is_some_and(|list| list.iter().any(|one| value(test, Some(one))))
        }
        ValueMatch::OneOf(some) => some.iter().any(|test| value(test, found)),
    }
}

/// Returns whether a request is gRPC, by its content type.
pub fn is_grpc(head: &RequestHead) -> bool {
    head.header("content-type")
        .and_then(|value| value.strip_prefix(b"application/grpc"))
        .is_some_and(|rest| rest.is_empty() || rest[0] == b'+')
}

#[cfg(test)]
mod tests {
    use super::*;

    fn exact(text: &str) -> TextMatch {
        TextMatch::Exact(text.as_bytes().into())
    }

    #[test]
    fn strings_are_matched() {
        let bytes = |text: &str| Box::<[u8]>::from(text.as_bytes());
        let any_case = |test| TextMatch::IgnoreCase(Box::new(test));
        let cases = [
            (exact("a"), "a", true),
            (exact("a"), "ab", false),
            (TextMatch::Prefix(bytes("ab")), "abc", true),
            (TextMatch::Prefix(bytes("ab")), "a", false),
            (TextMatch::Suffix(bytes("bc")), "abc", true),
            (TextMatch::Contains(bytes("b")), "abc", true),
            (TextMatch::Contains(bytes("")), "abc", true),
            (TextMatch::Regex(regex::bytes::Regex::new("^(?:a+)$").unwrap()), "aa", true),
            (any_case(exact("ab")), "Ab", true),
            (any_case(TextMatch::Prefix(bytes("ab"))), "ABc", true),
            (any_case(TextMatch::Suffix(bytes("bc"))), "aBC", true),
            (any_case(TextMatch::Suffix(bytes("bc"))), "C", false),
            (any_case(TextMatch::Contains(bytes("bc"))), "aBCd", true),
        ];
        for (test, value, expected) in cases {
            assert_eq!(text(&test, value.as_bytes()), expected, "{test:?} {value}");
        }
    }

    #[test]
    fn headers_are_matched_present_absent_repeated_and_inverted() {
        let head = RequestHead::build("GET", "/a?b", "h", &[("x", "1"), ("y", "2"), ("y", "3"), ("n", "-7")]);
        let test = |name: &str, test, invert, missing_as_empty| HeaderMatch {
            name: name.into(),
            test,
            invert,
            missing_as_empty,
        };
        let cases = [
            (test("x", HeaderTest::Present(true), false, false), true),
            (test("x", HeaderTest::Present(true), true, false), false),
            (test("x", HeaderTest::Present(false), false, false), false),
            (test("z", HeaderTest::Present(true), false, false), false),
            (test("z", HeaderTest::Present(true), true, false), true),
            (test("z", HeaderTest::Present(false), false, false), true),
            (test("y", HeaderTest::Value(exact("2,3")), false, false), false),
            (test("y", HeaderTest::Value(exact("3")), false, false), true),
            (test("y", HeaderTest::Value(exact("3")), true, false), false),
            (test("y", HeaderTest::Value(exact("4")), true, false), true),
            (test("y", HeaderTest::Range(3, 4), false, false), true),
            (test("z", HeaderTest::Present(false), false, true), false),
            (test("x", HeaderTest::Value(exact("2")), true, false), true),
            (test("z", HeaderTest::Value(exact("2")), true, false), false),
            (test("z", HeaderTest::Value(exact("2")), true, true), true),
            (test("n", HeaderTest::Range(-10, -7), false, false), false),
            (test("n", HeaderTest::Range(-7, 0), false, false), true),
            (test("x", HeaderTest::Range(1, 2), false, false), true),
            (test(":method", HeaderTest::Value(exact("GET")), false, false), true),
            (test(":path", HeaderTest::Value(exact("/a?b")), false, false), true),
            (test(":authority", HeaderTest::Value(exact("h")), false, false), true),
        ];
        for (test, expected) in cases {
            assert_eq!(header(&test, &head), expected, "{test:?}");
        }
    }

    #[test]
    fn several_values_are_matched_by_the_rule_of_the_caller() {
        let head = RequestHead::build("GET", "/", "h", &[("x", "1"), ("x", "2")]);
        for (name, text, invert, expected) in [
            ("x", "1", false, [true, true, false]),
            ("x", "1", true, [false, true, false]),
            ("x", "3", false, [false, false, false]),
            ("x", "3", true, [true, true, true]),
            ("y", "1", true, [false, false, false]),
            (":method", "GET", false, [true, true, true]),
        ] {
            let test = HeaderTest::Value(exact(text));
            let test = HeaderMatch { name: name.into(), test, invert, missing_as_empty: false };
            let held = [Values::One, Values::Any, Values::Every].map(|v| header_values(&test, &head, v));
            assert_eq!(held, expected, "{test:?}");
        }
    }

    #[test]
    fn grpc_is_detected_by_content_type() {
        for (value, expected) in [
            ("application/grpc", true),
            ("application/grpc+proto", true),
            ("application/grpc-web", false),
            ("text/plain", false),
        ] {
            let head = RequestHead::build("POST", "/", "h", &[("content-type", value)]);
            assert_eq!(is_grpc(&head), expected, "{value}");
        }
    }
}
