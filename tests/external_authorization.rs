//! External authorizers in a mesh: AuthorizationPolicies with action CUSTOM.

#![allow(clippy::unwrap_used, reason = "a test fails by panic")]

use std::process::{Child, Stdio};

use skysail_testkit::{Mesh, Setup, pod, service};
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

/// The authorizer is an echo server: it receives the path and the query of a request, and answers with the status that
/// the query names.
const AUTHORIZATION: &str = r"
apiVersion: v1
kind: ConfigMap
metadata: {name: istio, namespace: istio-system}
data:
  mesh: |
    extensionProviders:
    - name: ask
      envoyExtAuthzHttp:
        service: authorizer.default.svc.cluster.local
        port: 80
        timeout: 5s
        pathPrefix: /check
        includeRequestHeadersInCheck: [x-ask]
        includeAdditionalHeadersInCheck: {x-from: mesh}
        headersToDownstreamOnDeny: [content-type]
---
apiVersion: security.istio.io/v1
kind: AuthorizationPolicy
metadata: {name: ask}
spec:
  selector: {matchLabels: {app: web}}
  action: CUSTOM
  provider: {name: ask}
  rules: [{to: [{operation: {paths: ['/private*']}}]}]
";

fn answer(mesh: &Mesh, path: &str, status: u16, pod: &str) {
    let answer =
        mesh.call("front", &format!("http://web{path}"), &["-H", "x-ask: yes", "-H", "x-other: yes"]);
    assert_eq!(answer.status, Some(status), "{path}: {answer:?}");
    let echo = answer.json();
    assert_eq!(echo["pod"]["name"], pod, "{path}: {echo:#}");
    if pod == "authorizer" {
        let headers = &echo["headers"];
        assert_eq!((&headers["x-ask"], &headers["x-from"]), (&"yes".into(), &"mesh".into()), "{echo:#}");
        assert!(headers["x-other"].is_null(), "{echo:#}");
    }
}

/// The workloads `envoys` have a real Envoy.
fn asks_the_authorizer(envoys: &[&str]) {
    let services = ["web", "authorizer"].map(service);
    let pods = ["web", "authorizer", "front"].map(pod);
    let text = [&services[..], &pods, &[AUTHORIZATION.to_owned()]].concat().join("---\n");
    let mesh = Setup::of_text(env!("CARGO_BIN_EXE_skysail"), &text).with_envoys(envoys).ready();
    mesh.wait_status("front", "http://web/private", &[], 200);
    answer(&mesh, "/private", 200, "web");
    answer(&mesh, "/private?status=401", 401, "authorizer");
    // The rules do not match, so the server itself answers.
    answer(&mesh, "/public?status=401", 401, "web");

    // The authorizer is away: nothing that it would decide passes.
    mesh.edit("mesh.yaml", "selector: {app: authorizer}", "selector: {app: nobody}");
    mesh.wait_status("front", "http://web/private", &[], 403);
    answer(&mesh, "/public", 200, "web");

    // It fails open if the provider says so.
    mesh.edit("mesh.yaml", "timeout: 5s", "failOpen: true");
    mesh.wait_status("front", "http://web/private", &[], 200);

    // A provider that does not exist denies.
    mesh.edit("mesh.yaml", "- name: ask", "- name: other");
    mesh.wait_status("front", "http://web/private", &[], 403);
    answer(&mesh, "/public", 200, "web");
}

#[test]
fn an_authorizer_decides_about_matching_requests() {
    asks_the_authorizer(&[]);
}

#[test]
fn an_envoy_asks_the_authorizer() {
    asks_the_authorizer(&["default/web"]);
}

/// Provider with an authorizer that speaks gRPC, instead of the one of [`AUTHORIZATION`].
const GRPC: &str = r"envoyExtAuthzGrpc:
        service: authorizer.default.svc.cluster.local
        port: 9081
        timeout: 5s
";

/// Variable with the address of the authorizer's program.
const AUTHORIZER: &str = "SKYSAIL_TEST_AUTHORIZER";
/// Status of a denial. Source: `google.rpc.Code`.
const PERMISSION_DENIED: i32 = 7;

/// An authorizer that speaks gRPC. It admits requests whose header `x-ask` is `yes`, and adds the path and the caller
/// of the question to the request. It refuses others with status 418.
struct Authorizer;

#[tonic::async_trait]
impl Authorization for Authorizer {
    async fn check(
        &self,
        request: tonic::Request<CheckRequest>,
    ) -> Result<tonic::Response<CheckResponse>, tonic::Status> {
        let attributes = request.into_inner().attributes.unwrap_or_default();
        let http = attributes.request.and_then(|request| request.http).unwrap_or_default();
        let caller = attributes.source.unwrap_or_default().principal;
        let header = |key: &str, value: String| HeaderValueOption {
            header: Some(HeaderValue { key: key.into(), value, ..HeaderValue::default() }),
            ..HeaderValueOption::default()
        };
        let admits = http.headers.get("x-ask").is_some_and(|value| value == "yes");
        let (code, response) = if admits {
            let headers = vec![header("x-decided", format!("{} {caller}", http.path))];
            (0, HttpResponse::OkResponse(OkHttpResponse { headers, ..OkHttpResponse::default() }))
        } else {
            let status = Some(HttpStatus { code: 418 });
            let headers = vec![header("x-refused", "by the authorizer".into())];
            let denied = DeniedHttpResponse { status, headers, body: "no".into() };
            (PERMISSION_DENIED, HttpResponse::DeniedResponse(denied))
        };
        let status = Some(Status { code, ..Status::default() });
        let http_response = Some(response);
        Ok(tonic::Response::new(CheckResponse { status, http_response, ..CheckResponse::default() }))
    }
}

/// Refuses a request without headers. Serves decisions in the process that another test starts within a pod.
#[tokio::test]
async fn the_authorizer() {
    let refused = Authorizer.check(tonic::Request::new(CheckRequest::default())).await.unwrap().into_inner();
    assert_eq!(refused.status.unwrap().code, PERMISSION_DENIED);
    let Ok(address) = std::env::var(AUTHORIZER) else { return };
    let listener = tokio::net::TcpListener::bind(address).await.unwrap();
    let incoming = tokio_stream::wrappers::TcpListenerStream::new(listener);
    let service = AuthorizationServer::new(Authorizer);
    tonic::transport::Server::builder().add_service(service).serve_with_incoming(incoming).await.unwrap();
}

/// Starts the authorizer in its pod.
fn start_authorizer(mesh: &Mesh) -> Child {
    let program = std::env::current_exe().unwrap().to_string_lossy().into_owned();
    let variable = format!("{AUTHORIZER}=0.0.0.0:9081");
    let test = ["env", &variable, &program, "--exact", "the_authorizer", "--test-threads", "1"];
    let mut command = mesh.command(&[&["exec", "authorizer", "--"], &test[..]].concat());
    command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap()
}

#[test]
fn an_authorizer_that_speaks_grpc_decides_about_matching_requests() {
    let http = AUTHORIZATION.find("envoyExtAuthzHttp").unwrap()..AUTHORIZATION.find("---").unwrap();
    let mut provider = AUTHORIZATION.to_owned();
    provider.replace_range(http, GRPC);
    let authorizer =
        service("authorizer").replace("{name: http, port: 80, targetPort: 8080}", "{name: grpc, port: 9081}");
    let pods = ["web", "authorizer", "front"].map(pod);
    let text = [&[service("web"), authorizer, provider][..], &pods].concat().join("---\n");
    let mesh = Setup::of_text(env!("CARGO_BIN_EXE_skysail"), &text).ready();
    // Without the program, nothing that it would decide passes.
    mesh.wait_status("front", "http://web/private", &["-H", "x-ask: yes"], 403);
    let mut authorizer = start_authorizer(&mesh);
    mesh.wait_status("front", "http://web/private?a=b", &["-H", "x-ask: yes"], 200);
    let echo = mesh.call("front", "http://web/private?a=b", &["-H", "x-ask: yes"]).json();
    assert_eq!(
        echo["headers"]["x-decided"], "/private?a=b spiffe://cluster.local/ns/default/sa/default",
        "{echo:#}"
    );
    let refused = mesh.call("front", "http://web/private", &["-i"]);
    assert_eq!(refused.status, Some(418), "{refused:?}");
    assert!(
        refused.body.contains("x-refused: by the authorizer") && refused.body.ends_with("no"),
        "{refused:?}"
    );
    answer(&mesh, "/public", 200, "web");
    authorizer.kill().unwrap();
    authorizer.wait().unwrap();
}
