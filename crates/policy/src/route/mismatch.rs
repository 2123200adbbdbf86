//! The first criterion of a route that a request does not meet, as a sentence for people.
//!
//! Not part of the request path. [`mismatch`] agrees with [`matches`](super::matches) for every request, except that it
//! ignores [`RouteMatch::fraction`].

use serde_json::{Map, Value};

use super::{path_matches, query_parameter_matches};
use crate::{
    config::{
        route::{PathMatch, QueryMatch, RouteMatch},
        text::{HeaderMatch, HeaderTest, TextMatch},
    },
    matching,
};
use skysail_http::head::RequestHead;

/// Returns why a request does not match; `None` if it matches.
pub fn mismatch(
    test: &RouteMatch,
    head: &RequestHead,
    metadata: Option<&Map<String, Value>>,
) -> Option<String> {
    let path = head.path_without_query();
    if !path_matches(test, path.as_bytes()) {
        return Some(format!("path {path} is not {}", path_words(&test.path)));
    }
    if let Some(test) = test.headers.iter().find(|test| !matching::header(test, head)) {
        let (found, expected) = header_words(test, head);
        return Some(format!("{found}, expected: {expected}"));
    }
    if let Some(query) = test.query.iter().find(|query| !query_parameter_matches(query, head.query())) {
        return Some(query_words(query));
    }
    if test.grpc && !matching::is_grpc(head) {
        return Some("content-type is not application/grpc".to_owned());
    }
    let unmet = test.metadata.iter().find(|test| !matching::metadata(test, metadata))?;
    let path: Vec<&str> = unmet.path.iter().map(|key| &**key).collect();
    Some(format!("dynamic metadata {} does not match", path.join(".")))
}

fn path_words(test: &PathMatch) -> String {
    let words = |what: &str, text: &[u8]| format!("{what} {}", String::from_utf8_lossy(text));
    match test {
        PathMatch::Prefix(start) => words("below prefix", start),
        PathMatch::SeparatedPrefix(start) => words("below path prefix", start),
        PathMatch::Exact(whole) => words("equal to", whole),
        PathMatch::Regex(regex) => format!("matched by regular expression {regex}"),
        PathMatch::Template(regex) => format!("matched by path template {regex}"),
        PathMatch::Connect => "that of a CONNECT request".to_owned(),
    }
}

/// Returns the value of a header and what a test expects.
pub(crate) fn header_words(test: &HeaderMatch, head: &RequestHead) -> (String, String) {
    let name = &test.name;
    let value = head.pseudo_header(name).map(|value| value.as_bytes().to_vec());
    let value = value.or_else(|| head.header(name).map(<[u8]>::to_vec));
    let found = match &value {
        Some(value) => format!("header {name} is {:?}", String::from_utf8_lossy(value)),
        None => format!("header {name} is absent"),
    };
    let expected = match &test.test {
        HeaderTest::Present(true) => "present".to_owned(),
        HeaderTest::Present(false) => "absent".to_owned(),
        HeaderTest::Value(test) => text_words(test),
        HeaderTest::Range(from, to) => format!("an integer from {from} below {to}"),
    };
    let not = if test.invert { "not " } else { "" };
    (found, format!("{not}{expected}"))
}

fn query_words(test: &QueryMatch) -> String {
    match &test.value {
        Some(value) => format!("query parameter {} is not {}", test.name, text_words(value)),
        None => format!("query parameter {} is absent", test.name),
    }
}

/// Returns what a test of a text expects.
pub(crate) fn text_words(test: &TextMatch) -> String {
    let words = |what: &str, text: &[u8]| format!("{what}{:?}", String::from_utf8_lossy(text));
    match test {
        TextMatch::Exact(whole) => words("", whole),
        TextMatch::Prefix(start) => words("prefix ", start),
        TextMatch::Suffix(end) => words("suffix ", end),
        TextMatch::Contains(part) => words("containing ", part),
        TextMatch::Regex(regex) => format!("matched by {regex}"),
        TextMatch::IgnoreCase(inner) => format!("{} in any case", text_words(inner)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn route(path: PathMatch, headers: Vec<HeaderMatch>, query: Vec<QueryMatch>) -> RouteMatch {
        RouteMatch {
            path,
            case_sensitive: true,
            headers,
            query,
            grpc: false,
            metadata: Box::default(),
            fraction: None,
        }
    }

    fn header(name: &str, value: &str, invert: bool) -> HeaderMatch {
        let test = HeaderTest::Value(TextMatch::Exact(value.as_bytes().into()));
        HeaderMatch { name: name.into(), test, invert, missing_as_empty: false }
    }

    #[test]
    fn the_first_unmet_criterion_is_named() {
        let head = RequestHead::build("GET", "/reviews/1?a=b", "reviews:9080", &[("end-user", "jason")]);
        let all = || PathMatch::Prefix(b"/"[..].into());
        let query = |name: &str, value: Option<&str>| QueryMatch {
            name: name.into(),
            value: value.map(|value| TextMatch::Exact(value.as_bytes().into())),
        };
        for (test, expected) in [
            (route(all(), vec![], vec![]), None),
            (
                route(PathMatch::Exact(b"/other"[..].into()), vec![], vec![]),
                Some("path /reviews/1 is not equal to /other"),
            ),
            (route(all(), vec![header("end-user", "jason", false)], vec![]), None),
            (
                route(all(), vec![header("end-user", "ann", false)], vec![]),
                Some("header end-user is \"jason\", expected: \"ann\""),
            ),
            (
                route(all(), vec![header("end-user", "jason", true)], vec![]),
                Some("header end-user is \"jason\", expected: not \"jason\""),
            ),
            (
                route(all(), vec![header("cookie", "a", false)], vec![]),
                Some("header cookie is absent, expected: \"a\""),
            ),
            (
                route(all(), vec![header(":method", "POST", false)], vec![]),
                Some("header :method is \"GET\", expected: \"POST\""),
            ),
            (route(all(), vec![], vec![query("a", Some("b"))]), None),
            (route(all(), vec![], vec![query("a", Some("c"))]), Some("query parameter a is not \"c\"")),
            (route(all(), vec![], vec![query("d", None)]), Some("query parameter d is absent")),
        ] {
            let mut rng = fastrand::Rng::with_seed(1);
            assert_eq!(mismatch(&test, &head, None).as_deref(), expected);
            assert_eq!(super::super::matches(&test, &head, None, &mut rng), expected.is_none());
        }
    }
}
