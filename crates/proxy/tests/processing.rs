//! External processing, beside a real Envoy: the same processor has the same effect.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    reason = "a test ends with the first thing that goes wrong"
)]

#[path = "support/either.rs"]
mod either;
#[path = "support/envoy.rs"]
mod envoy;
#[path = "support/files.rs"]
mod files;
#[path = "support/program.rs"]
mod program;
mod support;

use std::{collections::BTreeMap, net::SocketAddr, pin::Pin};

use either::Either;
use files::{bootstrap, cluster, filter, http, listener, to, with};
use serde_json::{Value, json};
use skysail_xds::envoy::pb::{
    envoy::{
        config::core::v3::{HeaderValue, HeaderValueOption, header_value_option::HeaderAppendAction},
        extensions::filters::http::ext_proc::v3::{
            ProcessingMode,
            processing_mode::{BodySendMode, HeaderSendMode},
        },
        service::ext_proc::v3::{
            BodyMutation, BodyResponse, CommonResponse, GrpcStatus, HeaderMutation, HeadersResponse,
            HttpBody, HttpHeaders, ImmediateResponse, ProcessingRequest, ProcessingResponse,
            TrailersResponse,
            body_mutation::Mutation,
            common_response::ResponseStatus,
            external_processor_server::{ExternalProcessor, ExternalProcessorServer},
            processing_request::Request as Message,
            processing_response::Response as Answer,
        },
        r#type::v3::HttpStatus,
    },
    google::protobuf::{BoolValue, Duration, Struct, Value as ValueProto, value::Kind},
};
use support::{Client, within};
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::{TcpListener, TcpStream},
};
use tokio_stream::{Stream, wrappers::TcpListenerStream};
use tonic::{Request, Response, Status, Streaming, transport::Server};

/// A processor whose behaviour the path of a request selects. It adds what it got to headers.
struct Processes;

type Answers = Pin<Box<dyn Stream<Item = Result<ProcessingResponse, Status>> + Send>>;

#[tonic::async_trait]
impl ExternalProcessor for Processes {
    type ProcessStream = Answers;

    async fn process(
        &self,
        request: Request<Streaming<ProcessingRequest>>,
    ) -> Result<Response<Answers>, Status> {
        let call = request.metadata().get("x-call").map(|value| value.to_str().unwrap().to_owned());
        let mut messages = request.into_inner();
        let (sender, answers) = tokio::sync::mpsc::channel(8);
        tokio::spawn(async move {
            let (mut path, mut count) = (String::new(), 0);
            while let Ok(Some(message)) = messages.message().await {
                count += 1;
                if let Some(Message::RequestHeaders(headers)) = &message.request {
                    path = field(headers, ":path").unwrap_or_default();
                }
                for answer in answer(&path, count, message, call.as_deref()) {
                    let is_end = answer.is_err();
                    if sender.send(answer).await.is_err() || is_end {
                        return;
                    }
                }
                if path.starts_with("/end") {
                    return;
                }
            }
        });
        Ok(Response::new(Box::pin(tokio_stream::wrappers::ReceiverStream::new(answers))))
    }
}

fn field(headers: &HttpHeaders, name: &str) -> Option<String> {
    let all = &headers.headers.as_ref()?.headers;
    all.iter()
        .find(|header| header.key == name)
        .map(|header| String::from_utf8(header.raw_value.clone()).unwrap())
}

#[expect(deprecated, reason = "only this field has an effect")]
fn option(key: &str, value: &str, append: bool) -> HeaderValueOption {
    let raw_value = value.as_bytes().to_vec();
    let header = HeaderValue { key: key.to_owned(), raw_value, ..HeaderValue::default() };
    let append = Some(BoolValue { value: append });
    HeaderValueOption { header: Some(header), append, ..HeaderValueOption::default() }
}

fn set(fields: &[(&str, &str)]) -> HeaderMutation {
    let set_headers = fields.iter().map(|(key, value)| option(key, value, false));
    HeaderMutation { set_headers: set_headers.collect(), ..HeaderMutation::default() }
}

fn common(headers: HeaderMutation, body: Option<&str>) -> CommonResponse {
    let mutation = body.map(|body| BodyMutation { mutation: Some(Mutation::Body(body.as_bytes().to_vec())) });
    CommonResponse { header_mutation: Some(headers), body_mutation: mutation, ..CommonResponse::default() }
}

fn plain(answer: Answer) -> ProcessingResponse {
    ProcessingResponse { response: Some(answer), ..ProcessingResponse::default() }
}

fn attribute(message: &ProcessingRequest, name: &str) -> Option<Kind> {
    message.attributes.get("envoy.filters.http.ext_proc")?.fields.get(name)?.kind.clone()
}

/// Returns the answers to a message; an error ends the call.
fn answer(
    path: &str,
    count: u32,
    message: ProcessingRequest,
    call: Option<&str>,
) -> Vec<Result<ProcessingResponse, Status>> {
    let seen_path = attribute(&message, "request.path").map(|kind| format!("{kind:?}"));
    let seen_code = attribute(&message, "response.code").map(|kind| format!("{kind:?}"));
    let metadata = message.metadata_context.clone().unwrap_or_default();
    let metadata = metadata.filter_metadata.keys().cloned().collect::<Vec<_>>().join(",");
    let request = message.request.unwrap();
    let is_request =
        matches!(request, Message::RequestHeaders(_) | Message::RequestBody(_) | Message::RequestTrailers(_));
    match path {
        path if path.starts_with("/fail") => return vec![Err(Status::internal("no"))],
        path if path.starts_with("/end") => return Vec::new(),
        path if path.starts_with("/silent") => return Vec::new(),
        path if path.starts_with("/late-response") && !is_request => return Vec::new(),
        path if path.starts_with("/spurious") => {
            return vec![Ok(plain(Answer::ResponseBody(BodyResponse::default())))];
        }
        path if path.starts_with("/slow") && count == 1 => {
            let more = Duration { seconds: 5, nanos: 0 };
            let more =
                ProcessingResponse { override_message_timeout: Some(more), ..ProcessingResponse::default() };
            let mut answers = vec![Ok(more)];
            answers.extend(answer(
                "/",
                2,
                ProcessingRequest { request: Some(request), ..Default::default() },
                call,
            ));
            return answers;
        }
        path if path.starts_with("/immediate") && path.starts_with("/immediate-response") != is_request => {
            return vec![Ok(plain(Answer::ImmediateResponse(ImmediateResponse {
                status: Some(HttpStatus { code: 418 }),
                headers: Some(set(&[("x-reason", "teapot"), ("x-envoy-a", "b")])),
                body: b"short and stout".to_vec(),
                grpc_status: Some(GrpcStatus { status: 9 }),
                details: "teapot".to_owned(),
            })))];
        }
        _ => {}
    }
    let mut response = match request {
        Message::RequestHeaders(headers) => request_headers(path, &headers),
        Message::ResponseHeaders(headers) => {
            let status = field(&headers, ":status").unwrap();
            let note = format!("{status} end={} {}", headers.end_of_stream, seen_code.unwrap_or_default());
            let mut mutation = set(&[("x-response", &note), ("x-removed-by", "processor")]);
            mutation.remove_headers = vec!["x-server".to_owned()];
            if path.starts_with("/status") {
                mutation.set_headers.extend(set(&[(":status", "299")]).set_headers);
            }
            plain(Answer::ResponseHeaders(HeadersResponse { response: Some(common(mutation, None)) }))
        }
        Message::RequestBody(body) => {
            let new = body_answer(path, &body);
            plain(Answer::RequestBody(BodyResponse { response: Some(new) }))
        }
        Message::ResponseBody(body) => {
            let new = body_answer(path, &body);
            plain(Answer::ResponseBody(BodyResponse { response: Some(new) }))
        }
        Message::RequestTrailers(trailers) => {
            let count = trailers.trailers.unwrap().headers.len().to_string();
            let mutation = Some(set(&[("x-trailers", &count)]));
            plain(Answer::RequestTrailers(TrailersResponse { header_mutation: mutation }))
        }
        Message::ResponseTrailers(trailers) => {
            let count = trailers.trailers.unwrap().headers.len().to_string();
            let mutation = Some(set(&[("x-trailers", &count)]));
            plain(Answer::ResponseTrailers(TrailersResponse { header_mutation: mutation }))
        }
    };
    if let Some(Answer::RequestHeaders(headers)) = &mut response.response {
        let mutation = headers.response.as_mut().unwrap().header_mutation.as_mut().unwrap();
        let more =
            [("x-attribute", seen_path), ("x-call", call.map(str::to_owned)), ("x-metadata", Some(metadata))];
        for (key, value) in more {
            if let Some(value) = value.filter(|value| !value.is_empty()) {
                mutation.set_headers.extend(set(&[(key, &value)]).set_headers);
            }
        }
        if path.starts_with("/override") {
            response.mode_override = Some(ProcessingMode {
                response_header_mode: HeaderSendMode::Skip.into(),
                request_body_mode: BodySendMode::Buffered.into(),
                ..ProcessingMode::default()
            });
        }
        if path.starts_with("/metadata") {
            let text = ValueProto { kind: Some(Kind::StringValue("found".to_owned())) };
            let inner = Struct { fields: [("key".to_owned(), text)].into() };
            let inner = ValueProto { kind: Some(Kind::StructValue(inner)) };
            let fields = [("own".to_owned(), inner.clone()), ("other".to_owned(), inner)].into();
            response.dynamic_metadata = Some(Struct { fields });
        }
    }
    vec![Ok(response)]
}

#[expect(deprecated, reason = "only this field has an effect")]
fn request_headers(path: &str, headers: &HttpHeaders) -> ProcessingResponse {
    let end = format!("end={}", headers.end_of_stream);
    let seen = field(headers, "x-secret").unwrap_or_else(|| "hidden".to_owned());
    let mut mutation = set(&[("x-request", &end), ("x-seen", &seen)]);
    mutation.set_headers.push(option("x-list", "more", true));
    // Envoy ignores the action.
    let mut ignored = set(&[("x-action", "set")]).set_headers;
    ignored[0].append = None;
    ignored[0].append_action = HeaderAppendAction::OverwriteIfExists.into();
    mutation.set_headers.extend(ignored);
    mutation.remove_headers = vec!["x-gone".to_owned(), ":method".to_owned()];
    if path.starts_with("/system") {
        mutation.set_headers.extend(
            set(&[(":path", "/new?a=b"), (":authority", "other"), ("x-envoy-a", "b"), (":method", "PUT")])
                .set_headers,
        );
    }
    if path.starts_with("/reroute") {
        mutation.set_headers.extend(set(&[("x-route", "other")]).set_headers);
    }
    let replaces = path.starts_with("/replace");
    let mut response = common(mutation, replaces.then_some("replaced by the processor"));
    if replaces {
        response.set_status(ResponseStatus::ContinueAndReplace);
    }
    response.clear_route_cache = path.starts_with("/reroute");
    plain(Answer::RequestHeaders(HeadersResponse { response: Some(response) }))
}

fn body_answer(path: &str, body: &HttpBody) -> CommonResponse {
    let text = String::from_utf8_lossy(&body.body);
    let note = format!("{} end={}", body.body.len(), body.end_of_stream);
    let mut headers = set(&[("x-body", &note)]);
    if path.starts_with("/clear") {
        headers.remove_headers = vec!["content-length".to_owned()];
        let mutation = Some(BodyMutation { mutation: Some(Mutation::ClearBody(true)) });
        return CommonResponse {
            header_mutation: Some(headers),
            body_mutation: mutation,
            ..Default::default()
        };
    }
    let changes = path.starts_with("/change");
    common(headers, changes.then(|| text.to_uppercase()).as_deref())
}

/// Starts the processor.
async fn processor() -> Value {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let incoming = TcpListenerStream::new(listener);
    let server = Server::builder().add_service(ExternalProcessorServer::new(Processes));
    tokio::spawn(server.serve_with_incoming(incoming));
    cluster("processor", address, true)
}

/// Starts a server that answers with the request that it got.
async fn mirror() -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    tokio::spawn(async move {
        while let Ok((mut stream, _)) = listener.accept().await {
            tokio::spawn(async move {
                let mut input = Vec::new();
                loop {
                    let Some(length) = whole(&input) else {
                        let mut more = [0; 65536];
                        match stream.read(&mut more).await {
                            Ok(count @ 1..) => input.extend_from_slice(&more[..count]),
                            _ => return,
                        }
                        continue;
                    };
                    let rest = input.split_off(length);
                    let got = std::mem::replace(&mut input, rest);
                    let head =
                        format!("HTTP/1.1 200 OK\r\nx-server: here\r\ncontent-length: {}\r\n\r\n", got.len());
                    if stream.write_all(&[head.as_bytes(), &got].concat()).await.is_err() {
                        return;
                    }
                }
            });
        }
    });
    address
}

/// Returns the length of the first request, if all of it has arrived.
fn whole(input: &[u8]) -> Option<usize> {
    let text = String::from_utf8_lossy(input);
    let end = text.find("\r\n\r\n")? + 4;
    let head = text[..end].to_ascii_lowercase();
    if head.contains("transfer-encoding: chunked") {
        let last = text[end..]
            .find("\r\n0\r\n")
            .map(|place| place + 2)
            .or(text[end..].starts_with("0\r\n").then_some(0))?;
        return text[end + last..].find("\r\n\r\n").map(|place| end + last + place + 4);
    }
    let length = head.lines().find_map(|line| line.strip_prefix("content-length: "));
    let length = end + length.map_or(0, |length| length.parse().unwrap());
    (input.len() >= length).then_some(length)
}

/// Both proxies, with one listener of this configuration of the filter.
async fn both(config: &Value) -> [Either; 2] {
    both_with(config, &to("mirror"), &[]).await
}

async fn both_with(config: &Value, routes: &Value, before: &[Value]) -> [Either; 2] {
    let base = json!({
        "grpc_service": {"envoy_grpc": {"cluster_name": "processor"}}, "message_timeout": "20s"
    });
    let own = filter("http.ext_proc.v3.ExternalProcessor", &with(base, config));
    let filters = [before, &[own]].concat();
    let listeners = [listener("l", &[http(&filters, routes, &json!({}))])];
    let clusters = [cluster("mirror", mirror().await, false), processor().await];
    let text = bootstrap(&listeners, &clusters);
    let mut admin: Value = serde_json::from_str(&text).unwrap();
    admin["admin"] = json!({"address": files::address(SocketAddr::from(([127, 0, 0, 1], 0)))});
    admin["node"]["cluster"] = "a".into();
    Either::both(&admin.to_string()).await
}

/// Sends a request; returns the head of the response and its content, without what differs between runs.
async fn ask(proxy: &Either, request: &str) -> (String, String) {
    let mut client = Client::new(TcpStream::connect(proxy.listener("l").await).await.unwrap());
    client.send(request).await;
    let (head, body) = within(client.message()).await;
    (normal(&head), normal(&body))
}

/// Sorts the fields of a message, and drops those with times, identifiers and connection settings.
fn normal(message: &str) -> String {
    let Some((head, body)) = message.split_once("\r\n\r\n") else { return message.to_owned() };
    let mut lines = head.lines();
    // Reason phrases of other statuses than the usual ones differ.
    let first = lines.next().unwrap_or_default();
    let first = first.get(..12).filter(|start| start.starts_with("HTTP/")).unwrap_or(first).to_owned();
    let dropped = [
        "date",
        "x-request-id",
        "x-envoy-upstream-service-time",
        "x-forwarded",
        "server",
        "connection",
        "x-envoy-expected",
    ];
    let mut fields: BTreeMap<String, Vec<String>> = BTreeMap::new();
    for line in lines {
        let (name, value) = line.split_once(": ").unwrap_or((line, ""));
        let name = name.to_ascii_lowercase();
        // The length of an answer that contains a request differs with the fields above.
        let is_length = name == "content-length" && first.starts_with("HTTP");
        if !is_length && !dropped.iter().any(|other| name.starts_with(other)) {
            fields.entry(name).or_default().push(value.to_owned());
        }
    }
    let fields: Vec<_> =
        fields.iter().map(|(name, values)| format!("{name}: {}", values.join(","))).collect();
    format!("{first}\n{}\n\n{body}", fields.join("\n"))
}

/// Requires the same response from both; returns it.
async fn same(proxies: &[Either; 2], request: &str) -> (String, String) {
    let theirs = ask(&proxies[0], request).await;
    let ours = ask(&proxies[1], request).await;
    assert_eq!(ours, theirs, "{}", request.lines().next().unwrap_or_default());
    ours
}

fn get(path: &str) -> String {
    format!("GET {path} HTTP/1.1\r\nhost: a\r\nx-list: one\r\nx-gone: 1\r\nx-secret: s\r\n\r\n")
}

fn post(path: &str, body: &str) -> String {
    let length = body.len();
    format!("POST {path} HTTP/1.1\r\nhost: a\r\ncontent-length: {length}\r\n\r\n{body}")
}

#[tokio::test]
async fn headers_are_changed() {
    let proxies = both(&json!({
        "request_attributes": ["request.path"],
        "response_attributes": ["response.code"],
        "grpc_service": {"envoy_grpc": {"cluster_name": "processor"}, "initial_metadata": [{"key": "x-call", "value": "me"}]}
    }))
    .await;
    let (head, got) = same(&proxies, &get("/a")).await;
    assert!(head.contains("x-response: 200 end=false NumberValue(200.0)"), "{head}");
    assert!(!head.contains("x-server"), "{head}");
    for wanted in [
        "x-request: end=true",
        "x-seen: s",
        "x-list: one,more",
        "x-call: me",
        "x-attribute: StringValue(\"/a\")",
    ] {
        assert!(got.contains(wanted), "{wanted}: {got}");
    }
    assert!(!got.contains("x-gone") && got.contains("x-action: set"), "{got}");
    let (head, _) = same(&proxies, &get("/status")).await;
    assert!(head.starts_with("HTTP/1.1 299"), "{head}");
    let (_, got) = same(&proxies, &get("/system")).await;
    assert!(
        got.starts_with("GET /new?a=b HTTP/1.1") && got.contains("host: a\n") && !got.contains("x-envoy-a"),
        "{got}"
    );
    let (_, got) = same(&proxies, &post("/replace", "hello")).await;
    assert!(got.contains("replaced by the processor") && !got.contains("hello"), "{got}");
}

#[tokio::test]
async fn mutation_rules_are_honoured() {
    let proxies = both(&json!({"mutation_rules": {"allow_all_routing": true, "allow_envoy": true}})).await;
    let (_, got) = same(&proxies, &get("/system")).await;
    assert!(
        got.starts_with("PUT /new?a=b HTTP/1.1")
            && got.contains("host: other")
            && got.contains("x-envoy-a: b"),
        "{got}"
    );
    let rules = json!({"disallow_all": true, "allow_expression": {"regex": "x-l.*"}});
    let proxies = both(&json!({"mutation_rules": rules})).await;
    let (_, got) = same(&proxies, &get("/system")).await;
    assert!(
        got.starts_with("GET /system") && got.contains("x-list: one,more") && !got.contains("x-request: "),
        "{got}"
    );
    let proxies =
        both(&json!({"mutation_rules": {"disallow_system": true, "disallow_is_error": true}})).await;
    let (head, _) = same(&proxies, &get("/a")).await;
    assert!(head.starts_with("HTTP/1.1 500"), "{head}");
}

#[tokio::test]
async fn buffered_bodies_are_changed() {
    let mode = json!({"request_body_mode": "BUFFERED", "response_body_mode": "BUFFERED"});
    let proxies = both(&json!({"processing_mode": mode})).await;
    let (head, got) = same(&proxies, &post("/change", "hello")).await;
    assert!(head.contains("end=true"), "{head}");
    assert!(got.to_ascii_lowercase().contains("x-body: 5 end=true") && got.contains("HELLO"), "{got}");
    let (_, got) = same(&proxies, &post("/a", "hello")).await;
    assert!(got.ends_with("hello"), "{got}");
    // Envoy requires that the processor also changes `content-length`; the sidecar sets it.
    for proxy in &proxies {
        let (head, got) = ask(proxy, &post("/clear", "hello")).await;
        assert!(head.starts_with("HTTP/1.1 200") && got.is_empty(), "{head} {got}");
    }
    // A body in chunks without a known length, and one without content.
    let chunked =
        "POST /change HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n";
    let (_, got) = same(&proxies, chunked).await;
    assert!(got.contains("HELLO"), "{got}");
    same(&proxies, &get("/change")).await;
    let (head, _) = same(&proxies, &post("/a", &"x".repeat(2 << 20))).await;
    assert!(head.starts_with("HTTP/1.1 413"), "{head}");
}

#[tokio::test]
async fn the_start_of_a_larger_body_is_changed() {
    let proxies = both(&json!({"processing_mode": {"request_body_mode": "BUFFERED_PARTIAL"}})).await;
    for proxy in &proxies {
        let (_, got) = ask(proxy, &post("/change", "hello")).await;
        assert!(got.contains("HELLO") && got.contains("x-body: 5 end=true"), "{got}");
    }
    // The size of the part differs.
    let body = "x".repeat(3 << 20);
    for proxy in &proxies {
        let (head, got) = ask(proxy, &post("/change", &body)).await;
        let note = got.lines().find(|line| line.starts_with("x-body: "));
        let note = note.unwrap_or_else(|| panic!("{head} {}", got.chars().take(600).collect::<String>()));
        assert!(note.ends_with(" end=false"), "{note}");
        let size: usize = note["x-body: ".len()..].split(' ').next().unwrap().parse().unwrap();
        assert!((1 << 19..2 << 20).contains(&size), "{size}");
        let changed = got.bytes().filter(|byte| *byte == b'X').count();
        assert!(changed >= size && changed < size + 100, "{changed} {size}");
        assert!(got.bytes().filter(|byte| *byte == b'x').count() >= (3 << 20) - size);
    }
}

#[tokio::test]
async fn trailers_are_changed() {
    let mode = json!({"request_body_mode": "BUFFERED", "request_trailer_mode": "SEND"});
    let config = json!({"processing_mode": mode});
    let proxies = both(&config).await;
    let request = "POST /change HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\nx-t: 1\r\n\r\n";
    // Envoy drops trailers of HTTP/1.1 by default.
    let (_, got) = ask(&proxies[1], request).await;
    assert!(got.contains("x-body: 5 end=false"), "{got}");
    assert!(got.contains("x-trailers: 1") && got.contains("x-t: 1") && got.contains("HELLO"), "{got}");
}

#[tokio::test]
async fn a_processor_may_answer() {
    let proxies = both(&json!({})).await;
    let (head, body) = same(&proxies, &get("/immediate")).await;
    assert!(head.starts_with("HTTP/1.1 418") && head.contains("x-reason: teapot"), "{head}");
    assert_eq!(body, "short and stout");
    let (head, body) = same(&proxies, &get("/immediate-response")).await;
    assert!(head.starts_with("HTTP/1.1 418"), "{head}");
    assert_eq!(body, "short and stout");
    let grpc =
        "POST /immediate HTTP/1.1\r\nhost: a\r\ncontent-type: application/grpc\r\ncontent-length: 0\r\n\r\n";
    let (head, _) = same(&proxies, grpc).await;
    assert!(head.contains("grpc-status: 9"), "{head}");
    let proxies = both(&json!({"disable_immediate_response": true})).await;
    let (head, _) = same(&proxies, &get("/immediate")).await;
    assert!(!head.contains("418"), "{head}");
}

#[tokio::test]
async fn failures_end_the_request_or_are_allowed() {
    let proxies = both(&json!({"message_timeout": "0.3s"})).await;
    for (path, status) in [("/fail", "500"), ("/silent", "504"), ("/late-response", "504"), ("/end", "200")] {
        let (head, _) = same(&proxies, &get(path)).await;
        assert!(head.starts_with(&format!("HTTP/1.1 {status}")), "{path} {head}");
    }
    let proxies = both(&json!({"message_timeout": "0.3s", "failure_mode_allow": true})).await;
    for path in ["/fail", "/silent", "/late-response", "/end", "/spurious"] {
        let (head, _) = same(&proxies, &get(path)).await;
        assert!(head.starts_with("HTTP/1.1 200"), "{path} {head}");
    }
    let proxies = both(&json!({"status_on_error": {"code": "ServiceUnavailable"}})).await;
    let (head, _) = same(&proxies, &get("/fail")).await;
    assert!(head.starts_with("HTTP/1.1 503"), "{head}");
}

#[tokio::test]
async fn a_processor_may_ask_for_more_time() {
    let proxies = both(&json!({"message_timeout": "10s", "max_message_timeout": "10s"})).await;
    let (head, got) = same(&proxies, &get("/slow")).await;
    assert!(head.starts_with("HTTP/1.1 200") && got.contains("x-request: end=true"), "{head} {got}");
}

#[tokio::test]
async fn the_mode_may_be_overridden() {
    for (config, is_allowed) in [
        (json!({"allow_mode_override": true}), true),
        (json!({}), false),
        (
            json!({"allow_mode_override": true, "allowed_override_modes": [{"request_body_mode": "BUFFERED"}]}),
            false,
        ),
        (
            json!({"allow_mode_override": true, "allowed_override_modes": [
                {"request_body_mode": "BUFFERED", "response_header_mode": "SKIP"}]}),
            true,
        ),
    ] {
        let proxies = both(&config).await;
        let (head, got) = same(&proxies, &post("/override", "hello")).await;
        assert_eq!(got.contains("x-body: 5 end=true"), is_allowed, "{config} {got}");
        assert_eq!(head.contains("x-response"), !is_allowed, "{config} {head}");
    }
}

#[tokio::test]
async fn headers_are_forwarded_by_the_rules() {
    for (rules, seen) in [
        (json!({"disallowed_headers": {"patterns": [{"exact": "x-secret"}]}}), "hidden"),
        (json!({"allowed_headers": {"patterns": [{"prefix": ":"}, {"exact": "x-secret"}]}}), "s"),
        (json!({"allowed_headers": {"patterns": [{"prefix": ":"}]}}), "hidden"),
    ] {
        let proxies = both(&json!({"forward_rules": rules})).await;
        let (_, got) = same(&proxies, &get("/a")).await;
        assert!(got.contains(&format!("x-seen: {seen}")), "{rules} {got}");
    }
}

#[tokio::test]
async fn routes_are_selected_again_and_have_their_own_settings() {
    let kind = "type.googleapis.com/envoy.extensions.filters.http.ext_proc.v3.ExtProcPerRoute";
    let own =
        |config: Value| json!({"http.ext_proc.v3.ExternalProcessor": with(json!({"@type": kind}), &config)});
    let routes = json!([
        {"match": {"prefix": "/", "headers": [{"name": "x-route", "string_match": {"exact": "other"}}]},
            "direct_response": {"status": 203}},
        {"match": {"prefix": "/off"}, "route": {"cluster": "mirror"}, "typed_per_filter_config": own(json!({"disabled": true}))},
        {"match": {"prefix": "/quiet"}, "route": {"cluster": "mirror"}, "typed_per_filter_config": own(json!({"overrides": {
            "processing_mode": {"request_header_mode": "SKIP"}, "response_attributes": ["request.method"]}}))},
        {"match": {"prefix": "/fail"}, "route": {"cluster": "mirror"}, "typed_per_filter_config": own(json!({"overrides": {
            "failure_mode_allow": true, "grpc_initial_metadata": [{"key": "x-call", "value": "route"}]}}))},
        {"match": {"prefix": "/"}, "route": {"cluster": "mirror"}, "typed_per_filter_config": own(json!({"overrides": {
            "grpc_initial_metadata": [{"key": "x-call", "value": "route"}]}}))},
    ]);
    let proxies = both_with(&json!({}), &routes, &[]).await;
    let (head, _) = same(&proxies, &get("/reroute")).await;
    assert!(head.starts_with("HTTP/1.1 203"), "{head}");
    let (head, got) = same(&proxies, &get("/off")).await;
    assert!(!head.contains("x-response") && !got.contains("x-request: "), "{head} {got}");
    let (head, got) = same(&proxies, &get("/quiet")).await;
    assert!(head.contains("x-response") && !got.contains("x-request: "), "{head} {got}");
    let (head, _) = same(&proxies, &get("/fail")).await;
    assert!(head.starts_with("HTTP/1.1 200"), "{head}");
    let (_, got) = same(&proxies, &get("/a")).await;
    assert!(got.contains("x-call: route"), "{got}");
    let proxies = both_with(&json!({"route_cache_action": "RETAIN"}), &routes, &[]).await;
    let (head, _) = same(&proxies, &get("/reroute")).await;
    assert!(head.starts_with("HTTP/1.1 200"), "{head}");
}

#[tokio::test]
async fn metadata_is_exchanged_by_namespace() {
    let lua = filter(
        "http.lua.v3.Lua",
        &json!({"default_source_code": {"inline_string":
        "function envoy_on_request(h) h:streamInfo():dynamicMetadata():set('given', 'k', 'v') end"}}),
    );
    let namespaces = json!({
        "forwarding_namespaces": {"untyped": ["given", "none"]}, "receiving_namespaces": {"untyped": ["own"]}
    });
    let routes = json!([{"match": {"prefix": "/"}, "route": {"cluster": "mirror"}, "response_headers_to_add": [
        {"header": {"key": "x-own", "value": "%DYNAMIC_METADATA(own:key)%"}},
        {"header": {"key": "x-other", "value": "%DYNAMIC_METADATA(other:key)%"}}]}]);
    let proxies = both_with(&json!({"metadata_options": namespaces}), &routes, &[lua]).await;
    let (head, got) = same(&proxies, &get("/metadata")).await;
    assert!(got.contains("x-metadata: given"), "{got}");
    assert!(head.contains("x-own: found") && !head.contains("x-other: found"), "{head}");
}

#[tokio::test]
async fn unsupported_settings_are_refused_by_name() {
    let folder = tempfile::tempdir().unwrap();
    for (config, field) in [
        (json!({"observability_mode": true}), "observability_mode"),
        (
            json!({"processing_mode": {"request_body_mode": "STREAMED"}}),
            "processing_mode.request_body_mode: STREAMED",
        ),
        (json!({"processing_mode": {"response_body_mode": "FULL_DUPLEX_STREAMED"}}), "FULL_DUPLEX_STREAMED"),
        (json!({"processing_mode": {"response_trailer_mode": "SEND"}}), "response_trailer_mode"),
        (json!({"http_service": {}}), "http_service"),
        (json!({"request_attributes": ["request.nothing"]}), "request_attributes[0]"),
    ] {
        let service = json!({"grpc_service": {"envoy_grpc": {"cluster_name": "c"}}});
        let own = filter("http.ext_proc.v3.ExternalProcessor", &with(service, &config));
        let listeners = [listener("l", &[http(&[own], &json!([]), &json!({}))])];
        let file = folder.path().join("bootstrap.json");
        std::fs::write(&file, bootstrap(&listeners, &[])).unwrap();
        let output = std::process::Command::new(env!("CARGO_BIN_EXE_skysail-proxy"))
            .args(["--mode", "validate", "-c"])
            .arg(&file)
            .output()
            .unwrap();
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(!output.status.success() && said.contains(field), "{config}: {said}");
    }
}
