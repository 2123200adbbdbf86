//! An external processor.

use std::{net::SocketAddr, pin::Pin, sync::Mutex};

use serde_json::Value;
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
            StreamedBodyResponse, TrailersResponse,
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
use tokio::{net::TcpListener, sync::Notify};
use tokio_stream::{Stream, wrappers::TcpListenerStream};
use tonic::{Request, Response, Status, Streaming, transport::Server};

use super::files::cluster;

/// Messages to processors that only observe: the path of the request, and what they are.
pub(crate) static OBSERVED: Mutex<Vec<(String, String)>> = Mutex::new(Vec::new());
/// Notified of each of them.
pub(crate) static ARRIVED: Notify = Notify::const_new();

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
            let (mut streams, mut streamed) = ([false; 2], Streamed::default());
            while let Ok(Some(message)) = messages.message().await {
                count += 1;
                if let Some(config) = &message.protocol_config {
                    let modes = [config.request_body_mode(), config.response_body_mode()];
                    streams = modes.map(|mode| mode == BodySendMode::FullDuplexStreamed);
                }
                if let Some(Message::RequestHeaders(headers)) = &message.request {
                    path = field(headers, ":path").unwrap_or_default();
                }
                if message.observability_mode {
                    let text = format!("{:?}", message.request.as_ref().unwrap());
                    let kind = text.split('(').next().unwrap();
                    let seen = match message.request.as_ref().unwrap() {
                        Message::RequestBody(body) | Message::ResponseBody(body) => {
                            format!("{kind} {}", String::from_utf8_lossy(&body.body))
                        }
                        _ => kind.to_owned(),
                    };
                    OBSERVED.lock().unwrap().push((path.clone(), seen));
                    ARRIVED.notify_waiters();
                    if path.starts_with("/fail") {
                        let _ = sender.send(Err(Status::internal("no"))).await;
                        return;
                    }
                    continue;
                }
                if let Some(Message::RequestHeaders(headers)) = &message.request
                    && path.ends_with("second-waits")
                    && field(headers, "x-request").is_some()
                {
                    // The first processor has added the field.
                    tokio::time::sleep(std::time::Duration::from_secs(2)).await;
                }
                let is_request = is_of_request(message.request.as_ref().unwrap());
                let is_body = matches!(message.request, Some(Message::RequestBody(_)));
                let answers = if streams[usize::from(!is_request)] {
                    streamed.answers(&path, message)
                } else {
                    answer(&path, count, message, call.as_deref())
                };
                for answer in answers {
                    let is_end = answer.is_err();
                    if sender.send(answer).await.is_err() || is_end {
                        return;
                    }
                }
                let ends_with_chunk = path.starts_with("/body-end") && is_body;
                if path.starts_with("/end") || path.starts_with("/last") || ends_with_chunk {
                    return;
                }
            }
        });
        Ok(Response::new(Box::pin(tokio_stream::wrappers::ReceiverStream::new(answers))))
    }
}

/// The state of a processor that returns bodies in chunks of its own.
#[derive(Default)]
struct Streamed {
    /// Messages that wait for the end of the body.
    waiting: Vec<ProcessingRequest>,
}

impl Streamed {
    /// Returns the answers to a message. A path decides whether they wait for the whole body.
    fn answers(&mut self, path: &str, message: ProcessingRequest) -> Vec<Result<ProcessingResponse, Status>> {
        let is_end = match message.request.as_ref().unwrap() {
            Message::RequestHeaders(headers) | Message::ResponseHeaders(headers) => headers.end_of_stream,
            Message::RequestBody(body) | Message::ResponseBody(body) => body.end_of_stream,
            Message::RequestTrailers(_) | Message::ResponseTrailers(_) => true,
        };
        let is_headers =
            matches!(message.request, Some(Message::RequestHeaders(_) | Message::ResponseHeaders(_)));
        match path {
            "/early" if !is_headers => return vec![Ok(chunk(&message.request.unwrap(), Vec::new(), true))],
            "/lost" if !is_headers => return vec![Err(Status::internal("no"))],
            "/immediate-late" if is_end => return vec![Ok(teapot())],
            "/first" if is_headers => {
                let body = match message.request.as_ref().unwrap() {
                    Message::RequestHeaders(_) => Message::RequestBody(HttpBody::default()),
                    _ => Message::ResponseBody(HttpBody::default()),
                };
                return vec![Ok(chunk(&body, b"first".to_vec(), false))];
            }
            _ => {}
        }
        self.waiting.push(message);
        if path.starts_with("/whole") && !is_end {
            return Vec::new();
        }
        let mut answers = Vec::new();
        for message in std::mem::take(&mut self.waiting) {
            match message.request.as_ref().unwrap() {
                Message::RequestBody(body) | Message::ResponseBody(body) => {
                    // Each chunk becomes two, of other lengths.
                    let text = String::from_utf8_lossy(&body.body).to_uppercase();
                    let (first, second) = text.split_at(text.len() / 2);
                    let request = message.request.as_ref().unwrap();
                    answers.push(Ok(chunk(request, first.into(), false)));
                    answers.push(Ok(chunk(request, second.into(), body.end_of_stream)));
                }
                _ => answers.extend(answer("/a", 2, message, None)),
            }
        }
        answers
    }
}

/// Returns a chunk of a body.
fn chunk(request: &Message, body: Vec<u8>, end_of_stream: bool) -> ProcessingResponse {
    let chunk = StreamedBodyResponse { body, end_of_stream, ..StreamedBodyResponse::default() };
    let mutation = Some(BodyMutation { mutation: Some(Mutation::StreamedResponse(chunk)) });
    let response = Some(CommonResponse { body_mutation: mutation, ..CommonResponse::default() });
    plain(match request {
        Message::RequestBody(_) => Answer::RequestBody(BodyResponse { response }),
        _ => Answer::ResponseBody(BodyResponse { response }),
    })
}

fn is_of_request(message: &Message) -> bool {
    matches!(message, Message::RequestHeaders(_) | Message::RequestBody(_) | Message::RequestTrailers(_))
}

fn teapot() -> ProcessingResponse {
    plain(Answer::ImmediateResponse(ImmediateResponse {
        status: Some(HttpStatus { code: 418 }),
        headers: Some(set(&[("x-reason", "teapot"), ("x-envoy-a", "b")])),
        body: b"short and stout".to_vec(),
        grpc_status: Some(GrpcStatus { status: 9 }),
        details: "teapot".to_owned(),
    }))
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

/// Returns metadata with this value in two namespaces.
fn metadata_of(key: &str, value: &str) -> Struct {
    let text = ValueProto { kind: Some(Kind::StringValue(value.to_owned())) };
    let inner = Struct { fields: [(key.to_owned(), text)].into() };
    let inner = ValueProto { kind: Some(Kind::StructValue(inner)) };
    Struct { fields: [("own".to_owned(), inner.clone()), ("other".to_owned(), inner)].into() }
}

fn attribute(message: &ProcessingRequest, name: &str) -> Option<Kind> {
    message.attributes.get("envoy.filters.http.ext_proc")?.fields.get(name)?.kind.clone()
}

/// Returns the answers to a chunk, for paths that begin with `/body-`. Others are answered like other messages.
fn answer_to_chunk(path: &str, request: &Message) -> Option<Vec<Result<ProcessingResponse, Status>>> {
    let is_body = matches!(request, Message::RequestBody(_) | Message::ResponseBody(_));
    if !is_body || path.ends_with("-response") == is_of_request(request) {
        return None;
    }
    Some(match path.trim_end_matches("-response") {
        "/body-immediate" => vec![Ok(teapot())],
        "/body-fail" => vec![Err(Status::internal("no"))],
        "/body-silent" | "/body-end-second-waits" => Vec::new(),
        "/body-twice" => {
            let answer = || match request {
                Message::RequestBody(_) => Answer::RequestBody(BodyResponse::default()),
                _ => Answer::ResponseBody(BodyResponse::default()),
            };
            vec![Ok(plain(answer())), Ok(plain(answer()))]
        }
        "/body-huge" => {
            let new = common(set(&[]), Some(&"x".repeat(3 << 20)));
            vec![Ok(plain(Answer::RequestBody(BodyResponse { response: Some(new) })))]
        }
        "/body-streamed" => vec![Ok(chunk(request, b"x".to_vec(), false))],
        _ => return None,
    })
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
    let is_request = is_of_request(&request);
    if path.starts_with("/metadata-") && matches!(request, Message::RequestBody(_) | Message::ResponseBody(_))
    {
        let own = if path.ends_with("-grows") { format!("key-{count}") } else { "key".to_owned() };
        let answer = match is_request {
            true => Answer::RequestBody(BodyResponse::default()),
            false => Answer::ResponseBody(BodyResponse::default()),
        };
        let dynamic_metadata = Some(metadata_of(&own, &"m".repeat(10_000)));
        return vec![Ok(ProcessingResponse { dynamic_metadata, ..plain(answer) })];
    }
    if let Some(answers) = answer_to_chunk(path, &request) {
        return answers;
    }
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
            return vec![Ok(teapot())];
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
            response.dynamic_metadata = Some(metadata_of("key", "found"));
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

/// Starts the processor, and returns its cluster.
#[allow(dead_code, reason = "each test file uses a part of it")]
pub(crate) async fn processor() -> Value {
    cluster("processor", start().await, true)
}

/// Starts the processor.
pub(crate) async fn start() -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let incoming = TcpListenerStream::new(listener);
    let server = Server::builder().add_service(ExternalProcessorServer::new(Processes));
    tokio::spawn(server.serve_with_incoming(incoming));
    address
}
