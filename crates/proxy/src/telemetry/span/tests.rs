use prost::Message as _;
use skysail_proto::otlp::{ScopeSpans, any_value};

use super::*;

const ZIPKIN: Zipkin = Zipkin { long_ids: false, timed_ids: false, shared: true, w3c: false };

fn context() -> SpanContext {
    SpanContext {
        trace: 0x1a,
        long: false,
        span: 0x2b,
        parent: Some(0x3c),
        remote: true,
        sampled: true,
        state: "a=1".into(),
    }
}

fn span(context: &SpanContext, end: CallSide, outcome: SpanOutcome) -> Span<'_> {
    let mut tags = Tags::default();
    tags.set("http.method", "BREW");
    tags.set("a", "1");
    tags.set("a", "2");
    let start = SystemTime::UNIX_EPOCH + Duration::from_micros(5);
    Span { context, name: "n", end, start, duration: Duration::from_micros(7), tags, outcome }
}

#[test]
fn otlp_contains_every_field() {
    let (context, mut bytes) = (context(), Vec::new());
    let reporter = Reporter { service: "s", address: None };
    span(&context, CallSide::Client, SpanOutcome { status: 404, grpc: None }).write(
        Tracer::OpenTelemetry,
        reporter,
        &mut bytes,
    );
    let mut reported = ScopeSpans::decode(bytes.as_slice()).unwrap();
    let reported = reported.spans.pop().unwrap();
    assert_eq!(
        (reported.trace_id, reported.span_id),
        (0x1a_u128.to_be_bytes().to_vec(), 0x2b_u64.to_be_bytes().to_vec())
    );
    assert_eq!((reported.parent_span_id, &*reported.trace_state), (0x3c_u64.to_be_bytes().to_vec(), "a=1"));
    assert_eq!((reported.start_time_unix_nano, reported.end_time_unix_nano), (5000, 12_000));
    assert_eq!((reported.kind, reported.flags, &*reported.name), (SpanKind::Client.into(), 0x301, "n"));
    assert_eq!(reported.status.unwrap().code, i32::from(StatusCode::Error));
    let attributes =
        reported.attributes.into_iter().map(|one| (one.key, one.value.and_then(|value| value.value)));
    let text = |text: &str| Some(any_value::Value::StringValue(text.to_owned()));
    let wanted = [("http.method".to_owned(), text("_OTHER")), ("a".to_owned(), text("2"))];
    assert_eq!(attributes.collect::<Vec<_>>(), wanted);
}

#[test]
fn the_status_depends_on_the_reporting_end() {
    let context = context();
    let fails = |end, status, grpc| span(&context, end, SpanOutcome { status, grpc }).has_failed();
    assert!(fails(CallSide::Server, 500, None) && !fails(CallSide::Server, 404, None));
    assert!(fails(CallSide::Client, 404, None) && !fails(CallSide::Client, 302, None));
    assert!(fails(CallSide::Server, 200, Some(14)) && !fails(CallSide::Server, 200, Some(5)));
    assert!(fails(CallSide::Client, 200, Some(5)) && !fails(CallSide::Client, 200, Some(0)));
    // No response.
    assert!(!fails(CallSide::Client, 0, None));
}

#[test]
fn zipkin_contains_every_field() {
    let context = context();
    let reported = |end, zipkin, address| {
        let mut bytes = Vec::new();
        let reporter = Reporter { service: "s", address };
        span(&context, end, SpanOutcome::default()).write(Tracer::Zipkin(zipkin), reporter, &mut bytes);
        assert_eq!(bytes.pop(), Some(b','));
        serde_json::from_slice::<Value>(&bytes).unwrap()
    };
    let wanted = json!({
        "traceId": "000000000000001a", "id": "000000000000002b", "parentId": "000000000000003c", "name": "n",
        "kind": "SERVER", "shared": true, "timestamp": 5, "duration": 7,
        "annotations": [{"timestamp": 12, "value": "ss"}],
        "localEndpoint": {"serviceName": "s", "ipv4": "10.0.0.1", "port": 0},
        "tags": {"http.method": "BREW", "a": "2"},
    });
    assert_eq!(reported(CallSide::Server, ZIPKIN, Some([10, 0, 0, 1].into())), wanted);
    let other = reported(CallSide::Client, ZIPKIN, Some("::1".parse().unwrap()));
    assert_eq!((&other["kind"], &other["shared"]), (&json!("CLIENT"), &Value::Null));
    assert_eq!(
        (&other["annotations"][0]["value"], &other["localEndpoint"]["ipv6"]),
        (&json!("cr"), &json!("::1"))
    );
    assert_eq!(reported(CallSide::Server, Zipkin { shared: false, ..ZIPKIN }, None)["shared"], Value::Null);
}
