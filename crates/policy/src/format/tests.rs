use std::sync::Arc;

use super::*;
use crate::{
    config::{Endpoint, listener::Direction},
    error::Flags,
    operators::{self, Operator, OperatorSupport, Piece},
};
use skysail_http::head::ResponseHead;

/// Parses a format string as the translation does it.
fn parse(text: &str) -> Format {
    let parts = operators::parse(text).unwrap().into_iter().map(|piece| match piece {
        Piece::Text(text) => Part::Text(text.into()),
        Piece::Operator(Operator { name, argument, max_len }) => {
            Part::Operator { name: name.into(), argument: argument.map(Into::into), max_len }
        }
    });
    Format { parts: parts.collect() }
}

/// Istio's default text format.
const ISTIO: &str = "[%START_TIME%] \"%REQ(:METHOD)% %REQ(X-ENVOY-ORIGINAL-PATH?:PATH)% %PROTOCOL%\" \
    %RESPONSE_CODE% %RESPONSE_FLAGS% %RESPONSE_CODE_DETAILS% %CONNECTION_TERMINATION_DETAILS% \
    \"%UPSTREAM_TRANSPORT_FAILURE_REASON%\" %BYTES_RECEIVED% %BYTES_SENT% %DURATION% \
    %RESP(X-ENVOY-UPSTREAM-SERVICE-TIME)% \"%REQ(X-FORWARDED-FOR)%\" \"%REQ(USER-AGENT)%\" \
    \"%REQ(X-REQUEST-ID)%\" \"%REQ(:AUTHORITY)%\" \"%UPSTREAM_HOST%\" %UPSTREAM_CLUSTER_RAW% \
    %UPSTREAM_LOCAL_ADDRESS% %DOWNSTREAM_LOCAL_ADDRESS% %DOWNSTREAM_REMOTE_ADDRESS% \
    %REQUESTED_SERVER_NAME% %ROUTE_NAME%\n";

fn line(format: &str, context: &Context<'_>) -> String {
    let mut out = Vec::new();
    write(&parse(format), context, b"-", &mut out);
    String::from_utf8(out).unwrap()
}

fn time() -> SystemTime {
    SystemTime::UNIX_EPOCH + Duration::from_millis(1_709_209_845_007)
}

#[test]
fn the_default_line_of_istio_is_written() {
    let endpoint = Arc::new(Endpoint::new("10.244.0.12:9080".parse().unwrap(), None));
    let fields = [("user-agent", "curl/8.0"), ("x-request-id", "id-1"), ("x-envoy-original-path", "/old?a")];
    let head = RequestHead::build("GET", "/new", "reviews:9080", &fields);
    let answer = ResponseHead::build(200, &[("x-envoy-upstream-service-time", "3")]);
    let record = Record {
        duration: Duration::from_micros(4_900),
        status: 200,
        details: "via_upstream",
        bytes_sent: 295,
        endpoint: Some(&endpoint),
        upstream_local: Some("10.244.0.11:40000".parse().unwrap()),
        downstream_local: Some("10.96.0.5:9080".parse().unwrap()),
        downstream_remote: Some("10.244.0.11:50000".parse().unwrap()),
        route_name: "default",
        ..Record::new(Direction::Outbound, time())
    };
    let context = Context { record: &record, request: Some(&head), response: Some(&answer) };
    assert_eq!(
        line(ISTIO, &context),
        "[2024-02-29T12:30:45.007Z] \"GET /old?a HTTP/1.1\" 200 - via_upstream - \"-\" 0 295 4 3 \"-\" \
         \"curl/8.0\" \"id-1\" \"reviews:9080\" \"10.244.0.12:9080\" - 10.244.0.11:40000 10.96.0.5:9080 \
         10.244.0.11:50000 - default\n"
    );
}

#[test]
fn missing_values_of_a_connection_are_dashes() {
    let record = Record {
        flags: Flags::UF,
        upstream_failure: "delayed connect error: Connection refused",
        bytes_received: 5,
        server_name: Some("a.b"),
        ..Record::new(Direction::Inbound, time())
    };
    let context = Context { record: &record, request: None, response: None };
    assert_eq!(
        line(ISTIO, &context),
        "[2024-02-29T12:30:45.007Z] \"- - -\" 0 UF - - \"delayed_connect_error:_Connection_refused\" 5 0 0 - \
         \"-\" \"-\" \"-\" \"-\" \"-\" - - - - a.b -\n"
    );
}

#[test]
fn single_operators_keep_their_json_type() {
    let head = RequestHead::build("GET", "/a?b", "h", &[("q", "say \"hi\"\u{1}")]);
    let record = Record { status: 503, ..Record::new(Direction::Inbound, time()) };
    let context = Context { record: &record, request: Some(&head), response: None };
    let cases = [
        ("%RESPONSE_CODE%", "503"),
        ("%ROUTE_NAME%", "null"),
        ("%REQ(Q)%", r#""say \"hi\"\u0001""#),
        ("a %ROUTE_NAME%", r#""a -""#),
        ("%REQ_WITHOUT_QUERY(:PATH)%", r#""/a""#),
        ("%REQ(:METHOD):2%", r#""GE""#),
        ("", r#""""#),
    ];
    for (format, expected) in cases {
        let mut out = Vec::new();
        write_json(&parse(format), &context, &mut out);
        assert_eq!(String::from_utf8(out).unwrap(), expected, "{format}");
    }
}

#[test]
fn parts_of_addresses_are_written() {
    let record = Record {
        downstream_remote: Some("[::1]:5".parse().unwrap()),
        downstream_direct: Some("10.0.0.1:6".parse().unwrap()),
        ..Record::new(Direction::Inbound, time())
    };
    let context = Context { record: &record, request: None, response: None };
    let cases = [
        ("%DOWNSTREAM_REMOTE_ADDRESS%", "[::1]:5"),
        ("%DOWNSTREAM_REMOTE_ADDRESS_WITHOUT_PORT%", "::1"),
        ("%DOWNSTREAM_REMOTE_PORT%", "5"),
        ("%DOWNSTREAM_DIRECT_REMOTE_ADDRESS_WITHOUT_PORT%", "10.0.0.1"),
        ("%UPSTREAM_REMOTE_PORT%", "-"),
    ];
    for (format, expected) in cases {
        assert_eq!(line(format, &context), expected, "{format}");
    }
}

#[test]
fn times_and_statuses_are_written_in_the_form_of_the_argument() {
    let record = Record { grpc_status: Some(7), ..Record::new(Direction::Inbound, time()) };
    let context = Context { record: &record, request: None, response: None };
    assert_eq!(
        line("%START_TIME(%Y/%m/%dT%H:%M:%S%z %s.%3f)%", &context),
        "2024/02/29T12:30:45+0000 1709209845.007"
    );
    assert_eq!(line("%START_TIME(%s.%3f):10%", &context), "1709209845");
    assert_eq!(line("%GRPC_STATUS% %GRPC_STATUS_NUMBER%", &context), "PermissionDenied 7");
    let record = Record { grpc_status: Some(99), ..Record::new(Direction::Inbound, time()) };
    assert_eq!(line("%GRPC_STATUS%", &Context { record: &record, ..context }), "99");
}

#[test]
fn every_operator_of_istios_format_is_supported() {
    for piece in operators::parse(ISTIO).unwrap() {
        if let Piece::Operator(operator) = piece {
            assert_eq!(operator.support(), OperatorSupport::All, "{operator:?}");
        }
    }
}

#[test]
fn days_are_converted_to_dates() {
    let cases = [
        (0, "1970-01-01T00:00:00.000Z"),
        (951_782_400, "2000-02-29T00:00:00.000Z"),
        (951_868_800, "2000-03-01T00:00:00.000Z"),
        (1_798_761_599, "2026-12-31T23:59:59.000Z"),
        (4_107_542_400, "2100-03-01T00:00:00.000Z"),
    ];
    for (seconds, expected) in cases {
        let mut out = Vec::new();
        write_time(SystemTime::UNIX_EPOCH + Duration::from_secs(seconds), &mut out);
        assert_eq!(String::from_utf8(out).unwrap(), expected);
    }
}
