//! Cross-origin resource sharing: the decision of Envoy's CORS filter.

use crate::{
    config::{route::Cors, text::TextMatch},
    matching,
};
use skysail_http::head::{RequestHead, ResponseHead};

/// Headers to set in a response.
pub type Fields = Vec<(Box<str>, Box<[u8]>)>;

/// Decision on a request under a CORS policy.
#[derive(Debug)]
pub enum CorsDecision {
    /// The request continues unchanged: it is no CORS request, or its origin is not allowed.
    Pass,
    /// The request continues, and its response gets these headers.
    AddFields(Fields),
    /// The request is a preflight; this is the response.
    Respond(ResponseHead),
}

/// Value of a list that allows all methods or headers, and origin that stands for all.
const ALL: &str = "*";

/// Returns whether a request is a preflight.
pub fn is_preflight(head: &RequestHead) -> bool {
    let is_filled = |name| head.header(name).is_some_and(|value| !value.is_empty());
    head.method() == "OPTIONS" && is_filled("origin") && is_filled("access-control-request-method")
}

/// Decides on a request.
pub fn decide(cors: &Cors, head: &RequestHead) -> CorsDecision {
    let Some(origin) = head.header("origin").filter(|origin| !origin.is_empty()) else {
        return CorsDecision::Pass;
    };
    let is_allowed = |test: &TextMatch| matching::text(test, ALL.as_bytes()) || matching::text(test, origin);
    let origin = cors.origins.iter().any(is_allowed).then_some(origin);
    match (is_preflight(head), origin) {
        (true, origin) if origin.is_some() || !cors.forward_unmatched => {
            CorsDecision::Respond(preflight_answer(cors, head, origin))
        }
        (false, Some(origin)) => CorsDecision::AddFields(response_fields(cors, origin)),
        _ => CorsDecision::Pass,
    }
}

fn response_fields(cors: &Cors, origin: &[u8]) -> Fields {
    let mut marks = vec![("access-control-allow-origin".into(), origin.into())];
    if cors.credentials {
        marks.push(("access-control-allow-credentials".into(), b"true".as_slice().into()));
    }
    if let Some(expose) = &cors.expose {
        marks.push(("access-control-expose-headers".into(), expose.as_bytes().into()));
    }
    marks
}

/// Returns the response to a preflight. An origin that is not allowed (`None`) is not in it.
///
/// Browsers do not accept `*` in responses to requests with credentials, so it is replaced by what was requested.
fn preflight_answer(cors: &Cors, request: &RequestHead, origin: Option<&[u8]>) -> ResponseHead {
    let mut head = ResponseHead::build(200, &[]);
    if let Some(origin) = origin {
        head.append("access-control-allow-origin", origin);
    }
    if cors.credentials {
        head.append("access-control-allow-credentials", b"true");
    }
    for (name, value, requested) in [
        ("access-control-allow-methods", &cors.methods, "access-control-request-method"),
        ("access-control-allow-headers", &cors.headers, "access-control-request-headers"),
    ] {
        match value.as_deref() {
            Some(ALL) => head.append(name, request.header(requested).unwrap_or_default()),
            Some(value) => head.append(name, value.as_bytes()),
            None => {}
        }
    }
    if let Some(value) = &cors.max_age {
        head.append("access-control-max-age", value.as_bytes());
    }
    if let Some(value) = cors.expose.as_ref().filter(|_| origin.is_some()) {
        head.append("access-control-expose-headers", value.as_bytes());
    }
    head
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cors(forward_unmatched: bool) -> Cors {
        Cors {
            origins: vec![TextMatch::Exact(b"https://a.example".as_slice().into())],
            methods: Some("GET,POST".into()),
            headers: Some("x-foo".into()),
            expose: Some("x-bar".into()),
            max_age: Some("86400".into()),
            credentials: true,
            forward_unmatched,
        }
    }

    /// Returns the fields of the response to a request.
    fn answered(cors: &Cors, fields: &[(&str, &str)]) -> Vec<String> {
        let head = RequestHead::build("OPTIONS", "/", "h", fields);
        let CorsDecision::Respond(answer) = decide(cors, &head) else { panic!("not answered") };
        assert_eq!(answer.status(), 200);
        let text = |bytes| String::from_utf8_lossy(bytes).into_owned();
        answer.iter().map(|(name, value)| format!("{}: {}", text(name), text(value))).collect()
    }

    #[test]
    fn preflights_are_answered() {
        let ask = [("origin", "https://a.example"), ("access-control-request-method", "POST")];
        assert_eq!(
            answered(&cors(true), &ask),
            [
                "access-control-allow-origin: https://a.example",
                "access-control-allow-credentials: true",
                "access-control-allow-methods: GET,POST",
                "access-control-allow-headers: x-foo",
                "access-control-max-age: 86400",
                "access-control-expose-headers: x-bar",
            ]
        );
        let stranger = [("origin", "https://b.example"), ask[1]];
        let without_origin = answered(&cors(false), &stranger);
        assert_eq!(without_origin.len(), 4, "{without_origin:?}");
        assert!(!without_origin.iter().any(|field| field.contains("origin") || field.contains("expose")));
    }

    #[test]
    fn what_is_requested_replaces_wildcards() {
        let all = Cors {
            origins: vec![TextMatch::Exact(ALL.as_bytes().into())],
            methods: Some(ALL.into()),
            headers: Some(ALL.into()),
            expose: None,
            max_age: None,
            ..cors(false)
        };
        let ask = [("origin", "https://b.example"), ("access-control-request-method", "PUT")];
        let expected = [
            "access-control-allow-origin: https://b.example",
            "access-control-allow-credentials: true",
            "access-control-allow-methods: PUT",
        ];
        let with = |headers: &str| {
            [&expected[..], &[&format!("access-control-allow-headers: {headers}")]].concat().join("\n")
        };
        assert_eq!(answered(&all, &ask).join("\n"), with(""));
        let more = [ask[0], ask[1], ("access-control-request-headers", "x-one, x-two")];
        assert_eq!(answered(&all, &more).join("\n"), with("x-one, x-two"));
    }

    #[test]
    fn other_requests_pass_or_get_headers() {
        let head = |method, fields: &[(&str, &str)]| RequestHead::build(method, "/", "h", fields);
        let stranger = [("origin", "https://b.example"), ("access-control-request-method", "POST")];
        assert!(matches!(decide(&cors(true), &head("GET", &[])), CorsDecision::Pass));
        assert!(matches!(decide(&cors(true), &head("OPTIONS", &stranger)), CorsDecision::Pass));
        assert!(matches!(decide(&cors(true), &head("GET", &stranger)), CorsDecision::Pass));
        let friend = head("GET", &[("origin", "https://a.example")]);
        let CorsDecision::AddFields(marks) = decide(&cors(true), &friend) else { panic!("not marked") };
        assert!(marks.contains(&("access-control-expose-headers".into(), b"x-bar".as_slice().into())));
    }
}
