//! The services that filters ask by gRPC: a rate limit service, and an external processor. They run in the
//! pod `helper`.

use std::{
    env,
    pin::Pin,
    process::{Child, Stdio},
};

use skysail_testkit::Mesh;
use skysail_xds::envoy::pb::envoy::{
    config::core::v3::{HeaderValue, HeaderValueOption},
    service::{
        ext_proc::v3::{
            CommonResponse, HeaderMutation, HeadersResponse, ProcessingRequest, ProcessingResponse,
            external_processor_server::{ExternalProcessor, ExternalProcessorServer},
            processing_request::Request as Message,
            processing_response::Response as Answer,
        },
        ratelimit::v3::{
            RateLimitRequest, RateLimitResponse,
            rate_limit_response::Code,
            rate_limit_service_server::{RateLimitService, RateLimitServiceServer},
        },
    },
};
use tokio_stream::{Stream, StreamExt as _, wrappers::TcpListenerStream};
use tonic::{Request, Response, Status, Streaming};

/// Address on which the services listen; set in the process that serves them.
const ADDRESS: &str = "SKYSAIL_TEST_SERVICES";

/// The process of the services. It ends with this value.
pub(crate) struct Services(Child);

impl Services {
    /// Starts the services in their pod.
    pub(crate) fn start(mesh: &Mesh) -> Self {
        let program = env::current_exe().unwrap().to_string_lossy().into_owned();
        let variable = format!("{ADDRESS}=0.0.0.0:9081");
        let test =
            ["env", &variable, &program, "--ignored", "--exact", "services::serve", "--test-threads", "1"];
        let mut command = mesh.command(&[&["exec", "helper", "--"], &test[..]].concat());
        Self(command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap())
    }
}

impl Drop for Services {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Serves in the process that another test starts within a pod.
#[tokio::test]
#[ignore = "it serves another test"]
async fn serve() {
    let address = env::var(ADDRESS).unwrap();
    let listener = tokio::net::TcpListener::bind(address).await.unwrap();
    tonic::transport::Server::builder()
        .add_service(RateLimitServiceServer::new(Limiter))
        .add_service(ExternalProcessorServer::new(Processor))
        .serve_with_incoming(TcpListenerStream::new(listener))
        .await
        .unwrap();
}

/// A service that refuses the path `/limited`. Its responses have a header with the domain and the
/// descriptor.
struct Limiter;

#[tonic::async_trait]
impl RateLimitService for Limiter {
    async fn should_rate_limit(
        &self,
        request: Request<RateLimitRequest>,
    ) -> Result<Response<RateLimitResponse>, Status> {
        let request = request.into_inner();
        let entries = request.descriptors.iter().flat_map(|descriptor| &descriptor.entries);
        let entries: Vec<_> = entries.map(|entry| format!("{}={}", entry.key, entry.value)).collect();
        let limited = entries.iter().any(|entry| entry == "path=/limited");
        Ok(Response::new(RateLimitResponse {
            overall_code: if limited { Code::OverLimit } else { Code::Ok }.into(),
            response_headers_to_add: vec![HeaderValue {
                key: "x-descriptor".into(),
                value: format!("{} {}", request.domain, entries.join(" ")),
                ..Default::default()
            }],
            ..Default::default()
        }))
    }
}

/// A processor that adds a header with the path to requests.
struct Processor;

#[tonic::async_trait]
impl ExternalProcessor for Processor {
    type ProcessStream = Pin<Box<dyn Stream<Item = Result<ProcessingResponse, Status>> + Send>>;

    async fn process(
        &self,
        request: Request<Streaming<ProcessingRequest>>,
    ) -> Result<Response<Self::ProcessStream>, Status> {
        Ok(Response::new(Box::pin(request.into_inner().map(|message| answer(&message?)))))
    }
}

fn answer(message: &ProcessingRequest) -> Result<ProcessingResponse, Status> {
    let Some(Message::RequestHeaders(headers)) = &message.request else {
        return Err(Status::invalid_argument("only request headers are sent"));
    };
    let headers = headers.headers.as_ref().map(|map| &*map.headers).unwrap_or_default();
    let path = headers.iter().find(|header| header.key == ":path");
    let raw_value = path.map(|header| header.raw_value.clone()).unwrap_or_default();
    let header = HeaderValue { key: "x-processed".into(), raw_value, ..Default::default() };
    let set_headers = vec![HeaderValueOption { header: Some(header), ..Default::default() }];
    let mutation = HeaderMutation { set_headers, ..Default::default() };
    let response = Some(CommonResponse { header_mutation: Some(mutation), ..Default::default() });
    let response = Some(Answer::RequestHeaders(HeadersResponse { response }));
    Ok(ProcessingResponse { response, ..Default::default() })
}
