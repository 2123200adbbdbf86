//! Headers in the answers of a gRPC authorization service, in the sidecar and in Envoy.

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

use std::net::SocketAddr;

use either::Either;
use files::{address, bootstrap, cluster, filter, http, listener, to};
use serde_json::{Value, json};
use skysail_xds::envoy::pb::{
    envoy::{
        config::core::v3::{HeaderValue, HeaderValueOption, header_value_option::HeaderAppendAction},
        service::auth::v3::{
            CheckRequest, CheckResponse, DeniedHttpResponse, OkHttpResponse,
            authorization_server::{Authorization, AuthorizationServer},
            check_response::HttpResponse,
        },
    },
    google::{protobuf::BoolValue, rpc::Status},
};
use support::{Client, server};
use tokio::net::{TcpListener, TcpStream};
use tokio_stream::wrappers::TcpListenerStream;
use tonic::{Request, Response};

/// Actions by name: `append`, and `append_action`.
const ACTIONS: [(&str, Option<bool>, HeaderAppendAction); 7] = [
    ("append", Some(true), HeaderAppendAction::AppendIfExistsOrAdd),
    ("no-append", Some(false), HeaderAppendAction::AppendIfExistsOrAdd),
    ("append-wins", Some(true), HeaderAppendAction::OverwriteIfExists),
    ("add", None, HeaderAppendAction::AppendIfExistsOrAdd),
    ("if-absent", None, HeaderAppendAction::AddIfAbsent),
    ("overwrite-or-add", None, HeaderAppendAction::OverwriteIfExistsOrAdd),
    ("overwrite", None, HeaderAppendAction::OverwriteIfExists),
];

#[expect(deprecated, reason = "services still set `append`")]
fn option(
    key: String,
    value: &str,
    append: Option<bool>,
    append_action: HeaderAppendAction,
) -> HeaderValueOption {
    let header = HeaderValue { key, value: value.to_owned(), ..HeaderValue::default() };
    let (append, append_action) = (append.map(|value| BoolValue { value }), append_action.into());
    HeaderValueOption { header: Some(header), append, append_action, ..HeaderValueOption::default() }
}

/// Returns headers with this action, alone and before each other one. They exist (`x-has`) or not (`x-none`).
fn fields(wanted: &str) -> Vec<HeaderValueOption> {
    let (name, append, action) = ACTIONS.into_iter().find(|(name, ..)| *name == wanted).unwrap();
    let mut fields = Vec::new();
    for place in ["has", "none"] {
        fields.push(option(format!("x-{place}-{name}"), "new", append, action));
        for (other, second, after) in ACTIONS {
            let key = format!("x-{place}-{name}-then-{other}");
            fields.push(option(key.clone(), "1", append, action));
            fields.push(option(key, "2", second, after));
        }
    }
    fields
}

/// Returns the headers that exist.
fn existing(name: &str) -> String {
    let pairs: String =
        ACTIONS.iter().map(|(other, ..)| format!("x-has-{name}-then-{other}: old\r\n")).collect();
    format!("x-has-{name}: old\r\n{pairs}")
}

struct Changes;

#[tonic::async_trait]
impl Authorization for Changes {
    async fn check(&self, request: Request<CheckRequest>) -> Result<Response<CheckResponse>, tonic::Status> {
        let http = request.into_inner().attributes.unwrap().request.unwrap().http.unwrap();
        let mut parts = http.path.split('/').skip(1);
        let (place, action) = (parts.next().unwrap(), parts.next().unwrap());
        let of = |wanted| if place == wanted { fields(action) } else { Vec::new() };
        let denied = DeniedHttpResponse { headers: of("denied"), ..DeniedHttpResponse::default() };
        let ok = OkHttpResponse {
            headers: of("request"),
            response_headers_to_add: of("response"),
            ..OkHttpResponse::default()
        };
        let (code, response) = match place {
            "denied" => (7, HttpResponse::DeniedResponse(denied)),
            _ => (0, HttpResponse::OkResponse(ok)),
        };
        let status = Some(Status { code, ..Status::default() });
        Ok(Response::new(CheckResponse { status, http_response: Some(response), ..CheckResponse::default() }))
    }
}

/// Returns whether a line is compared. Envoy omits headers of denials with `append: true`.
fn is_compared(place: &str, line: &str) -> bool {
    let is_header = line.starts_with("x-has") || line.starts_with("x-none");
    is_header && (place != "denied" || !line.replace("no-append", "").contains("append"))
}

/// Sends a request, and returns the fields of interest of the response and of the request that the server got.
async fn ask(proxy: &Either, place: &str, action: &str) -> Vec<String> {
    let mut client = Client::new(TcpStream::connect(proxy.listener("l").await).await.unwrap());
    let fields = existing(action);
    client.send(&format!("GET /{place}/{action} HTTP/1.1\r\nhost: a\r\n{fields}\r\n")).await;
    let (head, body) = client.message().await;
    let kept = |text: &str| {
        let lines = text.lines().map(str::to_ascii_lowercase);
        let mut lines: Vec<_> = lines.filter(|line| is_compared(place, line)).collect();
        // The values of a field have an order, the fields have none.
        lines.sort_by(|one, other| one.split(':').next().cmp(&other.split(':').next()));
        lines
    };
    [kept(&head), vec!["request".to_owned()], kept(&body)].concat()
}

#[tokio::test]
async fn the_actions_of_headers_are_those_of_envoy() {
    let socket = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let authorizer = socket.local_addr().unwrap();
    let service = tonic::transport::Server::builder().add_service(AuthorizationServer::new(Changes));
    tokio::spawn(service.serve_with_incoming(TcpListenerStream::new(socket)));
    let upstream = server(|_, mut client: Client| async move {
        while let Some((head, _)) = client.message_if_any().await {
            let action = head.split([' ', '/']).nth(3).unwrap();
            let (fields, length) = (existing(action), head.len());
            client.send(&format!("HTTP/1.1 200 OK\r\n{fields}content-length: {length}\r\n\r\n{head}")).await;
        }
    });
    let check = json!({"grpc_service": {"envoy_grpc": {"cluster_name": "authorizer"}, "timeout": "30s"}});
    let manager = http(&[filter("http.ext_authz.v3.ExtAuthz", &check)], &to("upstream"), &json!({}));
    let clusters = [cluster("authorizer", authorizer, true), cluster("upstream", upstream.await, false)];
    let mut text: Value = serde_json::from_str(&bootstrap(&[listener("l", &[manager])], &clusters)).unwrap();
    text["admin"] = json!({"address": address(SocketAddr::from(([127, 0, 0, 1], 0)))});
    let proxies = Either::both(&text.to_string()).await;
    for place in ["request", "response", "denied"] {
        for (action, ..) in ACTIONS {
            let [theirs, ours] =
                [ask(&proxies[0], place, action).await, ask(&proxies[1], place, action).await];
            assert_eq!(ours, theirs, "{place} {action}");
        }
    }
}
