//! A program of the tests that runs within a pod: it records what it receives, and decides about requests.
//!
//! A path with `slow` is never answered, one with `deny` is denied.

use std::{
    convert::Infallible,
    fs::{self, File},
    future::pending,
    io::{Read as _, Write as _},
    net::TcpListener,
    pin::Pin,
    process::{Child, Stdio},
    thread,
    time::{Duration, Instant},
};

use skysail_testkit::{Mesh, eventually};
use skysail_xds::envoy::pb::{
    envoy::{
        config::core::v3::{HeaderValue, HeaderValueOption},
        service::{
            auth::v3::{
                CheckRequest, CheckResponse, OkHttpResponse,
                authorization_server::{Authorization, AuthorizationServer},
                check_response::HttpResponse,
            },
            ratelimit::v3::{
                RateLimitRequest, RateLimitResponse,
                rate_limit_response::Code,
                rate_limit_service_server::{RateLimitService, RateLimitServiceServer},
            },
        },
    },
    google::rpc::Status,
};
use tempfile::NamedTempFile;
use tonic::{
    body::Body,
    codegen::{Body as _, BoxFuture, Context, Poll, Service, http},
    server::NamedService,
    transport::Server,
};

/// Variable with the address on which the program listens.
const ADDRESS: &str = "SKYSAIL_TEST_COLLECTOR";
/// Port of requests of HTTP and calls of gRPC.
const PORT: u16 = 9081;
/// Port of raw connections, on loopback as well as on the pod's address.
const RAW_PORT: u16 = 9082;
/// Port of raw connections on loopback alone.
const LOCAL_PORT: u16 = 9083;

/// The running program.
pub(crate) struct Collector {
    child: Child,
    log: NamedTempFile,
}

impl Collector {
    /// Starts the program in a pod.
    pub(crate) fn start(mesh: &Mesh, pod: &str) -> Self {
        let log = NamedTempFile::new().unwrap();
        let program = std::env::current_exe().unwrap().to_string_lossy().into_owned();
        let variable = format!("{ADDRESS}=0.0.0.0:{PORT}");
        let test =
            ["env", &variable, &program, "--exact", "mesh_config_collector::the_collector", "--nocapture"];
        let mut command = mesh.command(&[&["exec", pod, "--"], &test[..]].concat());
        let output = File::create(log.path()).unwrap();
        let child = command.stdout(Stdio::from(output)).stderr(Stdio::null()).spawn().unwrap();
        let collector = Self { child, log };
        collector.wait("listens", &["listens"]);
        collector
    }

    /// Waits until one line of the record has all these texts, and returns it.
    pub(crate) fn wait(&self, what: &str, texts: &[&str]) -> String {
        self.wait_after(what, texts, || ())
    }

    /// Acts until one line of the record has all these texts, and returns it.
    pub(crate) fn wait_after(&self, what: &str, texts: &[&str], mut act: impl FnMut()) -> String {
        eventually(&format!("{what}: {texts:?}"), || {
            act();
            self.find(texts).ok_or_else(|| self.text())
        })
    }

    /// Returns the first line of the record with all these texts.
    pub(crate) fn find(&self, texts: &[&str]) -> Option<String> {
        let text = self.text();
        text.lines().find(|line| texts.iter().all(|text| line.contains(text))).map(str::to_owned)
    }

    fn text(&self) -> String {
        String::from_utf8_lossy(&fs::read(self.log.path()).unwrap()).into_owned()
    }
}

impl Drop for Collector {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Serves in the process that another test starts within a pod.
#[tokio::test]
async fn the_collector() {
    assert!(Record::new(String::new()).is_open);
    let Ok(address) = std::env::var(ADDRESS) else { return };
    for listener in [("0.0.0.0", RAW_PORT), ("127.0.0.1", LOCAL_PORT)] {
        let listener = TcpListener::bind(listener).unwrap();
        thread::spawn(move || serve_raw(&listener));
    }
    let listener = tokio::net::TcpListener::bind(address).await.unwrap();
    let incoming = tokio_stream::wrappers::TcpListenerStream::new(listener);
    println!("listens");
    Server::builder()
        .accept_http1(true)
        .add_service(AuthorizationServer::new(Decisions))
        .add_service(RateLimitServiceServer::new(Decisions))
        .add_service(Any::<0>)
        .add_service(Any::<1>)
        .add_service(Any::<2>)
        .add_service(Any::<3>)
        .add_service(Any::<4>)
        .add_service(Any::<5>)
        .add_service(Any::<6>)
        .serve_with_incoming(incoming)
        .await
        .unwrap();
}

/// Records the first bytes of each connection, and answers them as HTTP. On the port of all addresses, a client that
/// sends nothing for a second is answered as well.
fn serve_raw(listener: &TcpListener) {
    while let Ok((mut stream, _)) = listener.accept() {
        thread::spawn(move || {
            let is_local = stream.local_addr().unwrap().port() == LOCAL_PORT;
            if !is_local {
                stream.set_read_timeout(Some(Duration::from_secs(1))).unwrap();
            }
            let mut bytes = [0; 4096];
            let length = stream.read(&mut bytes).unwrap_or_default();
            println!("raw {:?}", String::from_utf8_lossy(&bytes[..length]));
            let _ = stream.write_all(b"HTTP/1.1 200 OK\r\nX-Own-Case: raw\r\ncontent-length: 3\r\n\r\nraw");
        });
    }
}

/// Records whether a request was answered.
struct Record {
    /// Path and body.
    what: String,
    begin: Instant,
    is_open: bool,
}

impl Record {
    fn new(what: String) -> Self {
        Self { what, begin: Instant::now(), is_open: true }
    }

    /// Does not return for a slow path.
    async fn answer(mut self) {
        if self.what.contains("slow") {
            pending::<()>().await;
        }
        self.is_open = false;
    }
}

impl Drop for Record {
    fn drop(&mut self) {
        if self.is_open {
            println!("given up {:?} after {}s", self.what, self.begin.elapsed().as_secs());
        }
    }
}

/// Accepts all requests of one of [`NAMES`].
#[derive(Clone)]
struct Any<const NAME: usize>;

macro_rules! named {
    ($($number:literal $name:literal)*) => {$(impl NamedService for Any<$number> { const NAME: &'static str = $name; })*};
}
named! {
    0 "envoy.service.accesslog.v3.AccessLogService"
    1 "opentelemetry.proto.collector.logs.v1.LogsService"
    2 "opentelemetry.proto.collector.trace.v1.TraceService"
    3 "own"
    4 "api"
    5 "v0.4"
    6 "skywalking.v3.TraceSegmentReportService"
}

impl<const NAME: usize> Service<http::Request<Body>> for Any<NAME> {
    type Response = http::Response<Body>;
    type Error = Infallible;
    type Future = BoxFuture<Self::Response, Infallible>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: http::Request<Body>) -> Self::Future {
        Box::pin(async move { Ok(accept(request).await) })
    }
}

/// Records a request after each piece of its body, and returns a body of text in a header.
async fn accept(request: http::Request<Body>) -> http::Response<Body> {
    let (head, mut body) = request.into_parts();
    let path = head.uri.path().to_owned();
    let slow = head.headers.get("x-slow").map_or("", |_| "/slow");
    let mut whole = Vec::new();
    while let Some(Ok(frame)) = std::future::poll_fn(|context| Pin::new(&mut body).poll_frame(context)).await
    {
        let Ok(data) = frame.into_data() else { continue };
        whole.extend_from_slice(&data);
        println!("{path} {:?} {:?}", head.headers, String::from_utf8_lossy(&whole));
    }
    let whole = String::from_utf8_lossy(&whole);
    Record::new(format!("{path}{slow} {whole}")).answer().await;
    let asked = head.headers.get("x-ask").and_then(|value| value.to_str().ok()).unwrap_or_default();
    // The body of a call is no valid header value.
    let verdict = http::HeaderValue::from_str(&format!("{whole} {asked}"));
    let verdict = verdict.unwrap_or(http::HeaderValue::from_static("invalid"));
    let response = http::Response::builder()
        .status(if path.contains("deny") { 403 } else { 200 })
        .header("x-verdict", verdict)
        .header("content-type", "application/grpc")
        .header("grpc-status", "0");
    response.body(Body::empty()).unwrap()
}

/// Decides about requests.
struct Decisions;

#[tonic::async_trait]
impl Authorization for Decisions {
    async fn check(
        &self,
        request: tonic::Request<CheckRequest>,
    ) -> Result<tonic::Response<CheckResponse>, tonic::Status> {
        let attributes = request.into_inner().attributes.unwrap_or_default();
        let http = attributes.request.and_then(|request| request.http).unwrap_or_default();
        Record::new(http.path).answer().await;
        let raw = String::from_utf8_lossy(&http.raw_body).into_owned();
        let value = format!("text={} raw={raw}", http.body);
        let header = HeaderValue { key: "x-verdict".into(), value, ..HeaderValue::default() };
        let headers = vec![HeaderValueOption { header: Some(header), ..HeaderValueOption::default() }];
        let ok = HttpResponse::OkResponse(OkHttpResponse { headers, ..OkHttpResponse::default() });
        let (status, http_response) = (Some(Status::default()), Some(ok));
        Ok(tonic::Response::new(CheckResponse { status, http_response, ..CheckResponse::default() }))
    }
}

#[tonic::async_trait]
impl RateLimitService for Decisions {
    async fn should_rate_limit(
        &self,
        request: tonic::Request<RateLimitRequest>,
    ) -> Result<tonic::Response<RateLimitResponse>, tonic::Status> {
        Record::new(request.into_inner().domain).answer().await;
        let overall_code = Code::OverLimit.into();
        Ok(tonic::Response::new(RateLimitResponse { overall_code, ..RateLimitResponse::default() }))
    }
}
