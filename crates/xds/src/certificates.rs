//! Istio's certificate service, `istio.v1.auth.IstioCertificateService`: client and server of its one method.

use std::sync::Arc;

use tonic::{
    Request, Status, client, codegen::http::uri::PathAndQuery, metadata::MetadataMap, transport::Channel,
};
use tonic_prost::ProstCodec;

use crate::{
    grpc::{self, Call, CallFuture, FIRST_REQUEST, Requests, Service},
    istio::{IstioCertificateRequest, IstioCertificateResponse},
};

/// Maximum length of a request, in bytes.
const MAX_REQUEST: usize = 64 * 1024;

/// Path of the method, `/package.Service/Method`.
pub const METHOD: &str = "/istio.v1.auth.IstioCertificateService/CreateCertificate";

/// Requests a certificate. Returns the PEM chain, leaf first, root last.
///
/// # Errors
/// The status with which the service refuses, or the cause of a failed connection.
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

/// A certificate authority.
pub trait Signer: Send + Sync + 'static {
    /// Authenticates the caller by the metadata and extensions of the call, and signs. Returns the PEM chain, leaf
    /// first.
    fn create_certificate(
        &self,
        request: Request<IstioCertificateRequest>,
    ) -> impl Future<Output = Result<Vec<String>, Status>> + Send;
}

/// The gRPC service for a [`Signer`].
#[derive(Debug)]
pub struct CertificateService<S>(Arc<S>);

impl<S> Clone for CertificateService<S> {
    fn clone(&self) -> Self {
        Self(Arc::clone(&self.0))
    }
}

impl<S: Signer> CertificateService<S> {
    /// Creates a service over a signer.
    pub fn new(signer: Arc<S>) -> Self {
        Self(signer)
    }
}

impl<S: Signer> Service for CertificateService<S> {
    fn has(&self, method: &str) -> bool {
        method == METHOD
    }

    fn handle(&self, call: Call) -> CallFuture {
        let signer = Arc::clone(&self.0);
        let Call { headers, extensions, requests, responses, account, .. } = call;
        let requests = Requests::new(requests, MAX_REQUEST, FIRST_REQUEST, &account, &extensions);
        Box::pin(grpc::unary(requests, responses, async move |request| {
            let request = Request::from_parts(MetadataMap::from_headers(headers), extensions, request);
            let cert_chain = signer.create_certificate(request).await?;
            Ok(IstioCertificateResponse { cert_chain })
        }))
    }
}
