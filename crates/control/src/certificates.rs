//! Signs workloads' certificate requests for whom they prove to be.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use skysail_core::{SpiffeId, logging::Throttle};
use skysail_identity::{Csr, Refusal, Signed};
use skysail_xds::{certificates::Signer, grpc::address, istio::IstioCertificateRequest};
use tonic::{Request, Status};
use tracing::{info, warn};

use crate::{
    audit::{Audit, Event, Text},
    authentication::{Authentication, Caller, Grant, caller},
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
    audit: Arc<Audit>,
    said: Throttle,
}

/// A certificate that may be handed out once it is on record.
struct Issued {
    signed: Signed,
    id: SpiffeId,
    /// What proved the identity.
    by: &'static str,
}

impl Certificates {
    pub(crate) fn new(
        keeper: Arc<Keeper>,
        authentication: Arc<Authentication>,
        lifetime: Duration,
        metrics: Arc<Metrics>,
        audit: Arc<Audit>,
    ) -> Self {
        let said = Throttle::new(Duration::from_secs(1));
        Self { keeper, authentication, lifetime, metrics, audit, said }
    }

    fn sign(&self, call: &Request<IstioCertificateRequest>) -> Result<Issued, Status> {
        let Caller::Proven(proof) = caller(call.extensions())? else {
            return Err(Status::unauthenticated("certificates are signed on the TLS port only"));
        };
        let id = &proof.id;
        let request = call.get_ref();
        let metadata = request.metadata.iter().flat_map(|metadata| metadata.fields.keys());
        if metadata.into_iter().any(|name| name == "ImpersonatedIdentity") {
            return Err(Status::permission_denied(format!("{id} may not ask for another's certificate")));
        }
        let wish = match u64::try_from(request.validity_duration) {
            Ok(seconds) if seconds > 0 => Duration::from_secs(seconds).min(self.lifetime),
            _ => self.lifetime,
        };
        let Grant { lifetime, origin } = self.authentication.grant(&proof, wish)?;
        let refused = |refusal: Refusal| {
            count(&self.metrics.signing_failures);
            count(&self.metrics.refusals[refusal.index()]);
            Status::invalid_argument(format!("certificate signing request: {refusal}"))
        };
        let csr = Csr::from_pem(&request.csr).map_err(refused)?;
        csr.names_only(id, &self.authentication.aliases()).map_err(refused)?;
        let issued = self.keeper.current().issue(&csr, id, lifetime, origin.as_ref());
        let signed = issued.map_err(|error| {
            count(&self.metrics.signing_failures);
            Status::internal(error.to_string())
        })?;
        Ok(Issued { signed, id: id.clone(), by: proof.how() })
    }

    /// Puts a certificate on record; returns its chain.
    async fn hand_out(&self, issued: Issued, address: &str) -> Result<Vec<String>, Status> {
        let Issued { signed, id, by } = issued;
        let identity = id.to_string();
        let recorded = self.audit.confirm(Event::CertificateIssued {
            identity: Text(&identity),
            serial: &signed.serial,
            key_sha256: &signed.key_sha256,
            not_before: signed.not_before,
            not_after: signed.not_after,
            address: Text(address),
            authentication: by,
        });
        if !recorded.await {
            count(&self.metrics.signing_failures);
            return Err(Status::unavailable(
                "the audit log cannot be written, and certificates need their record (--audit-required); ask again",
            ));
        }
        count(&self.metrics.certificates_issued);
        info!(%id, not_after = ?signed.not_after, "certificate issued");
        Ok(signed.chain)
    }
}

impl Signer for Certificates {
    async fn create_certificate(
        &self,
        request: Request<IstioCertificateRequest>,
    ) -> Result<Vec<String>, Status> {
        count(&self.metrics.certificate_requests);
        let address = address(request.extensions());
        let signed = self.sign(&request);
        let handed_out = match signed {
            Ok(issued) => self.hand_out(issued, &address).await,
            Err(status) => Err(status),
        };
        handed_out.inspect_err(|status| {
            let reason = status.message();
            if let Some(more) = self.said.admit(Instant::now()) {
                warn!(address, reason, more, "certificate refused");
            }
            let (address, reason) = (Text(&address), Text(reason));
            self.audit.record(Event::CertificateRefused { address, reason, suppressed: 0 });
        })
    }
}
