//! Authorization services that answer denied requests with everything they received.

use std::{
    io::Write as _,
    net::{TcpListener, TcpStream},
    thread,
};

use serde_json::{Value, json};
use skysail_xds::envoy::pb::{
    envoy::{
        config::core::v3::{HeaderValue, HeaderValueOption},
        service::auth::v3::{
            CheckRequest, CheckResponse, DeniedHttpResponse, OkHttpResponse,
            authorization_server::{Authorization, AuthorizationServer},
            check_response::HttpResponse,
        },
        r#type::v3::HttpStatus,
    },
    google::rpc::Status,
};
use tokio_stream::wrappers::TcpListenerStream;
use tonic::{Request, Response, transport::Server};

use crate::servers::{background, cluster, options, read_body, read_head};

/// Decision of a service, which depends on the path.
enum Verdict {
    Yes,
    No,
    Broken,
}

fn verdict(path: &str) -> Verdict {
    let bare = path.split('?').next().unwrap_or_default();
    match bare.len() % 4 {
        0 | 1 => Verdict::Yes,
        2 => Verdict::No,
        _ if bare.len() == 7 => Verdict::Broken,
        _ => Verdict::No,
    }
}

/// Returns a cluster with an HTTP service.
pub(crate) fn http() -> Value {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    thread::spawn(move || {
        for connection in listener.incoming() {
            thread::spawn(move || serve(connection.unwrap()));
        }
    });
    cluster("http-authorizer", port)
}

fn serve(mut connection: TcpStream) {
    let mut input = Vec::new();
    while let Some(head) = read_head(&mut connection, &mut input) {
        let Some((body, _)) = read_body(&mut connection, &mut input, &head) else { return };
        let mut lines: Vec<&str> = head.lines().map(str::trim_end).collect();
        lines[1..].sort_unstable();
        let path = lines[0].split(' ').nth(1).unwrap();
        let headers = "x-a: of-authorizer\r\nx-b: of-authorizer\r\nx-new: of-authorizer\r\n";
        // Fields in which each proxy describes itself are not compared.
        lines.retain(|line| {
            !["x-envoy-internal", "x-forwarded-for", "x-envoy-expected-rq"]
                .iter()
                .any(|own| line.starts_with(own))
        });
        let received = format!("{}\n{body}", lines.join("\n"));
        let (status, content) = match verdict(path.strip_prefix("/check").unwrap()) {
            Verdict::Yes => ("200 OK", ""),
            Verdict::No => ("401 Unauthorized", received.as_str()),
            Verdict::Broken => ("503 Service Unavailable", ""),
        };
        let answer =
            format!("HTTP/1.1 {status}\r\ncontent-length: {}\r\n{headers}\r\n{content}", content.len());
        if connection.write_all(answer.as_bytes()).is_err() {
            return;
        }
    }
}

/// Returns a cluster with a gRPC service.
pub(crate) fn grpc() -> Value {
    let port = background(|listener| async {
        let service = AuthorizationServer::new(Decides);
        let incoming = TcpListenerStream::new(listener);
        Server::builder().add_service(service).serve_with_incoming(incoming).await.unwrap();
    });
    let mut cluster = cluster("grpc-authorizer", port);
    cluster["typed_extension_protocol_options"] = options(json!({"http2_protocol_options": {}}));
    cluster
}

struct Decides;

#[tonic::async_trait]
impl Authorization for Decides {
    async fn check(&self, request: Request<CheckRequest>) -> Result<Response<CheckResponse>, tonic::Status> {
        let attributes = request.into_inner().attributes.unwrap();
        let http = attributes.request.unwrap().http.unwrap();
        let fields = |value: &str| {
            let header = |name: &str| HeaderValueOption {
                header: Some(HeaderValue {
                    key: name.to_owned(),
                    value: value.to_owned(),
                    ..HeaderValue::default()
                }),
                ..HeaderValueOption::default()
            };
            vec![header("x-a"), header("x-new")]
        };
        let (code, response) = match verdict(&http.path) {
            Verdict::Broken => return Err(tonic::Status::unavailable("broken")),
            Verdict::Yes => {
                let ok = OkHttpResponse {
                    headers: fields("by-grpc"),
                    headers_to_remove: vec!["x-b".to_owned()],
                    response_headers_to_add: fields("for-client"),
                    ..OkHttpResponse::default()
                };
                (0, HttpResponse::OkResponse(ok))
            }
            Verdict::No => {
                // `connection` concerns one hop, and the sidecar does not forward it.
                let mut headers: Vec<_> =
                    http.headers.iter().filter(|(name, _)| *name != "connection").collect();
                headers.sort();
                let source = attributes.source.unwrap();
                // If a part of the body is checked, its length depends on timing.
                let is_part =
                    http.headers.get("x-envoy-auth-partial-body").is_some_and(|part| part == "true");
                let size = if is_part { "some".to_owned() } else { http.size.to_string() };
                let body = format!(
                    "{} {} {} {} {} {} {:?} {:?} {:?} {headers:?}",
                    http.method,
                    http.path,
                    http.host,
                    http.scheme,
                    http.protocol,
                    size,
                    http.body,
                    source.principal,
                    attributes.context_extensions,
                );
                let status = Some(HttpStatus { code: 409 });
                (
                    7,
                    HttpResponse::DeniedResponse(DeniedHttpResponse {
                        status,
                        headers: fields("denied"),
                        body,
                    }),
                )
            }
        };
        let status = Some(Status { code, ..Status::default() });
        Ok(Response::new(CheckResponse { status, http_response: Some(response), ..CheckResponse::default() }))
    }
}
