use skysail_xds::envoy::pb::{
    envoy::{
        config::core::v3::HeaderValue,
        service::auth::v3::{DeniedHttpResponse, OkHttpResponse},
        r#type::v3::HttpStatus,
    },
    google::{
        protobuf::{BoolValue, Value as ValueProto},
        rpc::Status,
    },
};

use super::*;

fn option(key: &str, value: &str, append: Option<bool>) -> HeaderValueOption {
    #[expect(deprecated, reason = "services still set it")]
    HeaderValueOption {
        header: Some(HeaderValue { key: key.to_owned(), value: value.to_owned(), ..HeaderValue::default() }),
        append: append.map(|value| BoolValue { value }),
        ..HeaderValueOption::default()
    }
}

fn decision(code: i32, response: Option<HttpResponse>) -> AuthorizationVerdict {
    let status = Some(Status { code, ..Status::default() });
    grpc_decision(CheckResponse { status, http_response: response, ..CheckResponse::default() })
}

#[test]
fn an_allowing_response_changes_the_request() {
    let ok = OkHttpResponse {
        headers: vec![
            option("X-Set", "new\r\nx-evil: 1", None),
            option("x-list", "b", Some(true)),
            option("x-none", "b", Some(true)),
            option(":path", "/other", None),
            option("host", "b.example", None),
            option("Content-Length", "5", None),
            option("transfer-encoding", "chunked", None),
        ],
        headers_to_remove: vec!["X-Gone".to_owned(), ":method".to_owned(), "host".to_owned()],
        ..OkHttpResponse::default()
    };
    let AuthorizationVerdict::Allow(changes) = decision(0, Some(HttpResponse::OkResponse(ok))) else {
        panic!("refused")
    };
    assert!(changes.change_request());
    let fields = [("x-set", "old"), ("x-list", "a"), ("x-gone", "1")];
    let mut head = RequestHead::build("GET", "/a", "a.example", &fields);
    changes.apply(&mut head);
    let after: Vec<(&[u8], &[u8])> = head.iter().collect();
    assert_eq!(after, [(&b"x-set"[..], &b"newx-evil: 1"[..]), (b"x-list", b"a,b")]);
    assert_eq!((head.method(), head.path(), head.authority()), ("GET", "/a", "b.example"));
}

#[test]
fn other_responses_deny_the_request() {
    let refused = |status| AuthorizationVerdict::Deny { status, headers: Vec::new(), body: Vec::new() };
    assert_eq!(decision(7, None), refused(403));
    // The message allows, but the status does not.
    assert_eq!(decision(7, Some(HttpResponse::OkResponse(OkHttpResponse::default()))), refused(403));
    for (code, status) in [(302, 302), (0, 403), (7, 403), (999, 403)] {
        let denied =
            DeniedHttpResponse { status: Some(HttpStatus { code }), ..DeniedHttpResponse::default() };
        assert_eq!(decision(16, Some(HttpResponse::DeniedResponse(denied))), refused(status));
    }
    assert_eq!(decision(0, None), AuthorizationVerdict::Allow(HeaderChanges::default()));
}

#[test]
fn metadata_are_converted_to_json() {
    let text = ValueProto { kind: Some(ValueKind::StringValue("a".to_owned())) };
    let list = skysail_xds::envoy::pb::google::protobuf::ListValue { values: vec![text] };
    let fields = [("list".to_owned(), ValueProto { kind: Some(ValueKind::ListValue(list)) })];
    let json = json(Struct { fields: fields.into_iter().collect() });
    assert_eq!(Value::Object(json), serde_json::json!({"list": ["a"]}));
}
