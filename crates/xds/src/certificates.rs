//! Istio's certificate service, `istio.v1.auth.IstioCertificateService`: its one method, both ends.

use std::{convert::Infallible, pin::Pin, sync::Arc, task};

use tonic::{
    Request, Response, Status,
    body::Body,
    client,
    codegen::{
        BoxFuture, Service,
        http::{self, uri::PathAndQuery},
    },
    metadata::MetadataMap,
    server::{self, NamedService, UnaryService},
    transport::Channel,
};
use tonic_prost::ProstCodec;

use crate::istio::{IstioCertificateRequest, IstioCertificateResponse};

/// The longest call that is read, in bytes.
const LONGEST: usize = 64 * 1024;

const METHOD: &str = "/istio.v1.auth.IstioCertificateService/CreateCertificate";

/// Asks for a certificate; gives the PEM chain, leaf first, root last.
///
/// # Errors
/// The service's refusal, or why it was not reached.
pub async fn create_certificate(
    channel: Channel,
    metadata: MetadataMap,
    request: IstioCertificateRequest,
) -> Result<Vec<String>, Status> {
    let mut grpc = client::Grpc::new(channel);
    grpc.ready().await.map_err(|error| Status::unavailable(error.to_string()))?;
    let request = Request::from_parts(metadata, Default::default(), request);
    let codec = ProstCodec::<IstioCertificateRequest, IstioCertificateResponse>::default();
    let response = grpc.unary(request, PathAndQuery::from_static(METHOD), codec).await?;
    Ok(response.into_inner().cert_chain)
}

/// Who signs.
pub trait Signer: Send + Sync + 'static {
    /// Establishes who asks, from the call's metadata and extensions, and signs; gives the chain as above.
    fn create_certificate(
        &self,
        request: Request<IstioCertificateRequest>,
    ) -> impl Future<Output = Result<Vec<String>, Status>> + Send;
}

/// The gRPC service.
#[derive(Debug)]
pub struct CertificateService<S>(Arc<S>);

impl<S> Clone for CertificateService<S> {
    fn clone(&self) -> Self {
        Self(Arc::clone(&self.0))
    }
}

impl<S: Signer> CertificateService<S> {
    /// A service that lets `signer` sign.
    pub fn new(signer: Arc<S>) -> Self {
        Self(signer)
    }
}

impl<S> NamedService for CertificateService<S> {
    const NAME: &'static str = "istio.v1.auth.IstioCertificateService";
}

/// The service as the handler of one call.
struct Method<S>(Arc<S>);

impl<S: Signer> UnaryService<IstioCertificateRequest> for Method<S> {
    type Response = IstioCertificateResponse;
    type Future = Pin<Box<dyn Future<Output = Result<Response<Self::Response>, Status>> + Send>>;

    fn call(&mut self, request: Request<IstioCertificateRequest>) -> Self::Future {
        let signer = Arc::clone(&self.0);
        Box::pin(async move {
            let cert_chain = signer.create_certificate(request).await?;
            Ok(Response::new(IstioCertificateResponse { cert_chain }))
        })
    }
}

impl<S: Signer> Service<http::Request<Body>> for CertificateService<S> {
    type Response = http::Response<Body>;
    type Error = Infallible;
    type Future = BoxFuture<Self::Response, Self::Error>;

    fn poll_ready(&mut self, _: &mut task::Context<'_>) -> task::Poll<Result<(), Infallible>> {
        task::Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: http::Request<Body>) -> Self::Future {
        let signer = Arc::clone(&self.0);
        Box::pin(async move {
            if request.uri().path() != METHOD {
                return Ok(Status::unimplemented("no such method").into_http());
            }
            let codec = ProstCodec::<IstioCertificateResponse, IstioCertificateRequest>::default();
            let mut grpc = server::Grpc::new(codec).max_decoding_message_size(LONGEST);
            Ok(grpc.unary(Method(signer), request).await)
        })
    }
}
