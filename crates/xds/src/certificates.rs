//! Istio's certificate service, `istio.v1.auth.IstioCertificateService`: its one method, both ends.

use std::sync::Arc;

use tonic::{
    Request, Status, client, codegen::http::uri::PathAndQuery, metadata::MetadataMap, transport::Channel,
};
use tonic_prost::ProstCodec;

use crate::{
    grpc::{self, Answering, Call, FIRST_REQUEST, Requests, Service},
    istio::{IstioCertificateRequest, IstioCertificateResponse},
};

/// The longest call that is read, in bytes.
const LONGEST: usize = 64 * 1024;

/// The method, `/package.Service/Method`.
pub const METHOD: &str = "/istio.v1.auth.IstioCertificateService/CreateCertificate";

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

impl<S: Signer> Service for CertificateService<S> {
    fn has(&self, method: &str) -> bool {
        method == METHOD
    }

    fn answer(&self, call: Call) -> Answering {
        let signer = Arc::clone(&self.0);
        let Call { headers, extensions, requests, answers, account, .. } = call;
        let requests = Requests::new(requests, LONGEST, FIRST_REQUEST, &account, &extensions);
        Box::pin(grpc::unary(requests, answers, async move |request| {
            let request = Request::from_parts(MetadataMap::from_headers(headers), extensions, request);
            let cert_chain = signer.create_certificate(request).await?;
            Ok(IstioCertificateResponse { cert_chain })
        }))
    }
}
