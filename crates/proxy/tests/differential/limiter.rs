//! A rate limit service whose decision depends on the descriptors that it receives.

use serde_json::{Value, json};
use skysail_xds::envoy::pb::{
    envoy::{
        config::core::v3::HeaderValue,
        service::ratelimit::v3::{
            RateLimitRequest, RateLimitResponse,
            rate_limit_response::{Code, DescriptorStatus, RateLimit, rate_limit::Unit},
            rate_limit_service_server::{RateLimitService, RateLimitServiceServer},
        },
    },
    google::protobuf::Duration,
};
use tokio_stream::wrappers::TcpListenerStream;
use tonic::{Request, Response, transport::Server};

use crate::servers::{background, cluster, options};

/// Returns a cluster with the service.
pub(crate) fn grpc() -> Value {
    let port = background(|listener| async {
        let service = RateLimitServiceServer::new(Decides);
        let incoming = TcpListenerStream::new(listener);
        Server::builder().add_service(service).serve_with_incoming(incoming).await.unwrap();
    });
    let mut cluster = cluster("limiter", port);
    cluster["typed_extension_protocol_options"] = options(json!({"http2_protocol_options": {}}));
    cluster
}

struct Decides;

#[tonic::async_trait]
impl RateLimitService for Decides {
    async fn should_rate_limit(
        &self,
        request: Request<RateLimitRequest>,
    ) -> Result<Response<RateLimitResponse>, tonic::Status> {
        let request = request.into_inner();
        let mut received = format!("{} {}", request.domain, request.hits_addend);
        for descriptor in &request.descriptors {
            for entry in &descriptor.entries {
                received += &format!(" {}={}", entry.key, entry.value);
            }
            received += &format!(" {:?};", descriptor.hits_addend.map(|hits| hits.value));
        }
        let length = received.len();
        if length % 7 == 0 {
            return Err(tonic::Status::unavailable("broken"));
        }
        let overall = if length % 3 == 0 { Code::OverLimit } else { Code::Ok };
        let field = |key: &str, value: &str| HeaderValue {
            key: key.to_owned(),
            value: value.to_owned(),
            ..HeaderValue::default()
        };
        let status = |number: usize| DescriptorStatus {
            code: overall.into(),
            current_limit: Some(RateLimit {
                name: if number == 0 { "first".to_owned() } else { String::new() },
                requests_per_unit: 10 + number as u32,
                unit: if number == 1 { Unit::Minute } else { Unit::Hour }.into(),
            }),
            limit_remaining: (length % 5) as u32,
            duration_until_reset: Some(Duration { seconds: 7, nanos: 5 }),
            ..DescriptorStatus::default()
        };
        let mut response_fields = vec![field("x-a", "limited"), field("x-received", &received)];
        // Envoy would join the type with that of another server's response.
        if length % 2 == 0 && overall == Code::OverLimit && request.domain != "odd" {
            response_fields.push(field("content-type", "text/html"));
        }
        Ok(Response::new(RateLimitResponse {
            overall_code: overall.into(),
            statuses: (0..request.descriptors.len()).map(status).collect(),
            response_headers_to_add: response_fields,
            request_headers_to_add: vec![field("x-b", "checked")],
            raw_body: if length % 4 == 0 { received.into_bytes() } else { Vec::new() },
            ..RateLimitResponse::default()
        }))
    }
}
