//! Small vocabularies of the configuration and the requests, so that they often match, and functions for random
//! choices.

use fastrand::Rng;
use serde_json::{Value, json};

pub(crate) const HOSTS: [&str; 8] =
    ["a.example", "b.example", "a.b.example", "*.example", "*.b.example", "a.*", "a.b.*", "*"];
pub(crate) const HEADERS: [&str; 6] = ["x-a", "x-b", "x-a", "X-B", "x-c", "content-type"];
/// Field that policies match on. It occurs once, because repeated values are intentionally decided differently.
pub(crate) const RULED: &str = "x-c";
pub(crate) const VALUES: [&str; 10] =
    ["a", "b", "ab", "A", "", "one", "42", "-7", "a, b", "application/grpc"];
pub(crate) const PATHS: [&str; 10] = ["/", "/a", "/b", "/ab", "/a/b", "/A", "/a/", "/b/a", "/42", "/a/b/"];
pub(crate) const REGEXES: [&str; 8] =
    ["/.*", "/a.*", "/[ab]+", "/(a|b)/.*", "/\\d+", ".*b", "/a(/.*)?", "(?i)/ab?"];
pub(crate) const TEXTS: [&str; 6] = ["a", "b", "ab", "one", "4", "A"];
pub(crate) const FORMATS: [&str; 8] = [
    "plain",
    "%REQ(x-a)%",
    "%PROTOCOL%",
    "%REQ(:path)%",
    "a%%b",
    "%REQ(x-b?x-c)%",
    "<%REQ(:authority)%>",
    "%REQ(:method):2%",
];

pub(crate) fn one<'a>(rng: &mut Rng, from: &[&'a str]) -> &'a str {
    from[rng.usize(..from.len())]
}

/// Returns true with probability 1/`of`.
pub(crate) fn rarely(rng: &mut Rng, of: u32) -> bool {
    rng.u32(..of) == 0
}

pub(crate) fn many(rng: &mut Rng, max: usize, mut make: impl FnMut(&mut Rng) -> Value) -> Value {
    (0..rng.usize(..=max)).map(|_| make(rng)).collect()
}

/// Adds all fields of the second object to the first.
pub(crate) fn add(to: &mut Value, fields: Value) {
    if let (Value::Object(to), Value::Object(fields)) = (to, fields) {
        to.extend(fields);
    }
}

pub(crate) fn string_match(rng: &mut Rng, texts: &[&str]) -> Value {
    let text = one(rng, texts);
    let mut matcher = match rng.u8(..5) {
        0 => return json!({"safe_regex": {"regex": one(rng, &REGEXES)}}),
        1 => json!({"prefix": text}),
        2 => json!({"suffix": text}),
        3 => json!({"contains": text}),
        _ => json!({"exact": text}),
    };
    if rarely(rng, 3) {
        add(&mut matcher, json!({"ignore_case": true}));
    }
    matcher
}

pub(crate) fn header_match(rng: &mut Rng) -> Value {
    header_match_of(rng, &HEADERS)
}

pub(crate) fn header_match_of(rng: &mut Rng, names: &[&str]) -> Value {
    let name = if rarely(rng, 5) { one(rng, &[":method", ":authority", ":path"]) } else { one(rng, names) };
    let mut matcher = match rng.u8(..4) {
        0 => json!({"present_match": rng.bool()}),
        1 => json!({"range_match": {"start": -10, "end": rng.i32(-8..50)}}),
        _ => json!({"string_match": string_match(rng, &TEXTS)}),
    };
    add(&mut matcher, json!({"name": name, "invert_match": rarely(rng, 4)}));
    if rarely(rng, 4) {
        add(&mut matcher, json!({"treat_missing_header_as_empty": true}));
    }
    matcher
}

pub(crate) fn header_to_add(rng: &mut Rng) -> Value {
    let actions =
        ["APPEND_IF_EXISTS_OR_ADD", "ADD_IF_ABSENT", "OVERWRITE_IF_EXISTS_OR_ADD", "OVERWRITE_IF_EXISTS"];
    json!({
        "header": {"key": one(rng, &["x-a", "x-b", "x-new"]), "value": one(rng, &FORMATS)},
        "append_action": one(rng, &actions),
        "keep_empty_value": rng.bool(),
    })
}
