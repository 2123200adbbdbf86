//! Cross-origin resource sharing: the decision of Envoy's CORS filter.

use crate::{config::route::Cors, matching};
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

/// Returns whether a request is a preflight.
pub fn is_preflight(head: &RequestHead) -> bool {
    head.method() == "OPTIONS"
        && head.header("origin").is_some_and(|origin| !origin.is_empty())
        && head.has("access-control-request-method")
}

/// Decides on a request.
pub fn decide(cors: &Cors, head: &RequestHead) -> CorsDecision {
    let Some(origin) = head.header("origin").filter(|origin| !origin.is_empty()) else {
        return CorsDecision::Pass;
    };
    let allowed = cors.origins.iter().any(|test| matching::text(test, origin));
    match (is_preflight(head), allowed) {
        (true, true) => CorsDecision::Respond(preflight_answer(cors, origin)),
        (true, false) if !cors.forward_unmatched => CorsDecision::Respond(ResponseHead::build(200, &[])),
        (false, true) => CorsDecision::AddFields(response_fields(cors, origin)),
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

fn preflight_answer(cors: &Cors, origin: &[u8]) -> ResponseHead {
    let mut head = ResponseHead::build(200, &[]);
    head.append("access-control-allow-origin", origin);
    if cors.credentials {
        head.append("access-control-allow-credentials", b"true");
    }
    let given = [
        ("access-control-allow-methods", &cors.methods),
        ("access-control-allow-headers", &cors.headers),
        ("access-control-max-age", &cors.max_age),
    ];
    for (name, value) in given {
        if let Some(value) = value {
            head.append(name, value.as_bytes());
        }
    }
    head
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::text::TextMatch;

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

    #[test]
    fn preflights_are_answered() {
        let ask = [("origin", "https://a.example"), ("access-control-request-method", "POST")];
        let head = RequestHead::build("OPTIONS", "/", "h", &ask);
        let CorsDecision::Respond(answer) = decide(&cors(true), &head) else { panic!("not answered") };
        let fields: Vec<_> = answer
            .iter()
            .map(|(name, value)| {
                format!("{}: {}", String::from_utf8_lossy(name), String::from_utf8_lossy(value))
            })
            .collect();
        assert_eq!(answer.status(), 200);
        assert_eq!(
            fields,
            [
                "access-control-allow-origin: https://a.example",
                "access-control-allow-credentials: true",
                "access-control-allow-methods: GET,POST",
                "access-control-allow-headers: x-foo",
                "access-control-max-age: 86400",
            ]
        );
    }

    #[test]
    fn other_requests_pass_or_get_headers() {
        let head = |method, fields: &[(&str, &str)]| RequestHead::build(method, "/", "h", fields);
        let stranger = [("origin", "https://b.example"), ("access-control-request-method", "POST")];
        assert!(matches!(decide(&cors(true), &head("GET", &[])), CorsDecision::Pass));
        assert!(matches!(decide(&cors(true), &head("OPTIONS", &stranger)), CorsDecision::Pass));
        assert!(matches!(
            decide(&cors(false), &head("OPTIONS", &stranger)),
            CorsDecision::Respond(answer) if answer.is_empty()
        ));
        assert!(matches!(decide(&cors(true), &head("GET", &stranger)), CorsDecision::Pass));
        let friend = head("GET", &[("origin", "https://a.example")]);
        let CorsDecision::AddFields(marks) = decide(&cors(true), &friend) else { panic!("not marked") };
        assert!(marks.contains(&("access-control-expose-headers".into(), b"x-bar".as_slice().into())));
    }
}
