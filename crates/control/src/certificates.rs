//! Signs workloads' certificate requests for whom they prove to be.

use std::{sync::Arc, time::Duration};

use skysail_identity::{Csr, Refusal};
use skysail_xds::{certificates::Signer, istio::IstioCertificateRequest};
use tonic::{Request, Status};
use tracing::{info, warn};

use crate::{
    authentication::{Authentication, Caller, address, caller},
    authority::Keeper,
    metrics::{Metrics, count},
};

/// The certificate service's side of the authority.
pub(crate) struct Certificates {
    keeper: Arc<Keeper>,
    authentication: Arc<Authentication>,
    /// How long certificates live, at most and by default.
    lifetime: Duration,
    metrics: Arc<Metrics>,
}

impl Certificates {
    pub(crate) fn new(
        keeper: Arc<Keeper>,
        authentication: Arc<Authentication>,
        lifetime: Duration,
        metrics: Arc<Metrics>,
    ) -> Self {
        Self { keeper, authentication, lifetime, metrics }
    }

    fn sign(&self, call: &Request<IstioCertificateRequest>) -> Result<Vec<String>, Status> {
        let Caller::Proven(tls) = caller(call.extensions()) else {
            return Err(Status::unauthenticated("certificates are signed on the TLS port only"));
        };
        let id = self.authentication.identity(tls, call.metadata())?;
        let request = call.get_ref();
        let metadata = request.metadata.iter().flat_map(|metadata| metadata.fields.keys());
        if metadata.into_iter().any(|name| name == "ImpersonatedIdentity") {
            return Err(Status::permission_denied(format!("{id} may not ask for another's certificate")));
        }
        let lifetime = match u64::try_from(request.validity_duration) {
            Ok(seconds) if seconds > 0 => Duration::from_secs(seconds).min(self.lifetime),
            _ => self.lifetime,
        };
        let refused = |refusal: Refusal| {
            count(&self.metrics.signing_failures);
            count(&self.metrics.refusals[refusal.index()]);
            Status::invalid_argument(format!("certificate signing request: {refusal}"))
        };
        let csr = Csr::from_pem(&request.csr).map_err(refused)?;
        csr.names_only(&id, &self.authentication.aliases()).map_err(refused)?;
        let signed = self.keeper.current().issue(&csr, &id, lifetime).map_err(|error| {
            count(&self.metrics.signing_failures);
            Status::internal(error.to_string())
        })?;
        count(&self.metrics.certificates_issued);
        info!(%id, ?lifetime, "certificate issued");
        Ok(signed.chain)
    }
}

impl Signer for Certificates {
    async fn create_certificate(
        &self,
        request: Request<IstioCertificateRequest>,
    ) -> Result<Vec<String>, Status> {
        count(&self.metrics.certificate_requests);
        self.sign(&request).inspect_err(|status| {
            let address = address(request.extensions());
            warn!(address, reason = status.message(), "certificate refused");
        })
    }
}
