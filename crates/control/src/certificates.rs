//! Signs certificate requests of workloads for their authenticated principal.

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
    audit::{AuditEvent, AuditLog, ExternalText},
    authentication::{Authentication, Caller, Grant, Principal, caller},
    authority::AuthorityManager,
    metrics::{Metrics, count},
    rate_limit::{Rate, TokenBuckets},
};

/// Signs the requests of the certificate service.
pub(crate) struct CertificateSigner {
    authority: Arc<AuthorityManager>,
    authentication: Arc<Authentication>,
    /// Default and maximum lifetime of certificates.
    max_lifetime: Duration,
    metrics: Arc<Metrics>,
    audit: Arc<AuditLog>,
    quota: CertificateQuota,
    refusal_lines: Throttle,
    issue_lines: TokenBuckets,
}

/// Rate limit of log lines about issued certificates of one identity. The audit log has all of them.
const LOG_LINES: Rate = Rate { burst: 100.0, per_second: 1.0 };

/// Rate limits of certificate requests.
///
/// A proxy renews its certificate after half of its lifetime or later. Four requests per lifetime and pod leave room
/// for restarts and new roots. The minimum rates leave room for clients that request short lifetimes or retry after
/// failures.
struct CertificateQuota {
    /// Per pod, if the credential names one.
    pods: TokenBuckets,
    /// Per identity, for credentials that name no pod.
    identities: TokenBuckets,
}

impl CertificateQuota {
    /// Returns the limits for certificates of this lifetime.
    fn new(lifetime: Duration) -> Self {
        /// Number of pods per identity for which the limit without pod names is sufficient.
        const REPLICAS: f64 = 1_000.0;
        let renewals = 4.0 / lifetime.as_secs_f64();
        let pods = Rate { burst: 60.0, per_second: renewals.max(0.2) };
        let identities = Rate { burst: 2.0 * REPLICAS, per_second: (REPLICAS * renewals).max(50.0) };
        Self { pods: TokenBuckets::new(pods), identities: TokenBuckets::new(identities) }
    }

    /// Counts a request. Fails if its pod or identity is above the limit.
    fn admit(&self, principal: &Principal, now: Instant) -> Result<(), Status> {
        let (requester, buckets) = match &principal.pod {
            Some(pod) => (format!("pod {} {} of {}", pod.name, pod.uid, principal.id), &self.pods),
            None => (principal.id.to_string(), &self.identities),
        };
        if buckets.take(&requester, now).is_some() {
            return Ok(());
        }
        let Rate { burst, per_second } = buckets.rate();
        let pause = per_second.recip().ceil();
        Err(Status::resource_exhausted(format!(
            "{requester} requests too many certificates: the limit is {burst} at once and then {per_second:.1} per second; \
             retry in {pause} s"
        )))
    }
}

/// A signed certificate whose audit record is still to be written.
struct PendingCertificate {
    signed: Signed,
    id: SpiffeId,
    /// Credential of the caller: `token` or `certificate`.
    credential: &'static str,
}

impl CertificateSigner {
    pub(crate) fn new(
        authority: Arc<AuthorityManager>,
        authentication: Arc<Authentication>,
        lifetime: Duration,
        metrics: Arc<Metrics>,
        audit: Arc<AuditLog>,
    ) -> Self {
        let (refusal_lines, issue_lines) =
            (Throttle::new(Duration::from_secs(1)), TokenBuckets::new(LOG_LINES));
        Self {
            authority,
            authentication,
            max_lifetime: lifetime,
            metrics,
            audit,
            quota: CertificateQuota::new(lifetime),
            refusal_lines,
            issue_lines,
        }
    }

    async fn sign(&self, call: &Request<IstioCertificateRequest>) -> Result<PendingCertificate, Status> {
        let Caller::Authenticated(principal) = caller(call.extensions())? else {
            return Err(Status::unauthenticated("certificates are signed on the TLS port only"));
        };
        self.quota
            .admit(&principal, Instant::now())
            .inspect_err(|_| count(&self.metrics.certificates_over_quota))?;
        self.authentication.confirmed(call).await?;
        let id = &principal.id;
        let request = call.get_ref();
        let metadata = request.metadata.iter().flat_map(|metadata| metadata.fields.keys());
        if metadata.into_iter().any(|name| name == "ImpersonatedIdentity") {
            return Err(Status::permission_denied(format!(
                "{id} may not request a certificate for another identity (ImpersonatedIdentity)"
            )));
        }
        let requested = match u64::try_from(request.validity_duration) {
            Ok(seconds) if seconds > 0 => Duration::from_secs(seconds).min(self.max_lifetime),
            _ => self.max_lifetime,
        };
        let Grant { lifetime, origin } = self.authentication.grant(&principal, requested)?;
        let refused = |refusal: Refusal| {
            count(&self.metrics.signing_failures);
            count(&self.metrics.csr_refusals[refusal.index()]);
            Status::invalid_argument(format!("certificate signing request: {refusal}"))
        };
        let csr = Csr::from_pem(&request.csr).map_err(refused)?;
        csr.names_only(id, &self.authentication.aliases()).map_err(refused)?;
        let issued = self.authority.current().issue(&csr, id, lifetime, origin.as_ref());
        let signed = issued.map_err(|error| {
            count(&self.metrics.signing_failures);
            Status::internal(error.to_string())
        })?;
        Ok(PendingCertificate { signed, id: id.clone(), credential: principal.credential_name() })
    }

    /// Writes the audit record of a certificate and returns its chain.
    async fn issue(&self, pending: PendingCertificate, address: &str) -> Result<Vec<String>, Status> {
        let PendingCertificate { signed, id, credential } = pending;
        let identity = id.to_string();
        let recorded = self.audit.confirm(AuditEvent::CertificateIssued {
            identity: ExternalText(&identity),
            serial: &signed.serial,
            key_sha256: &signed.key_sha256,
            not_before: signed.not_before,
            not_after: signed.not_after,
            address: ExternalText(address),
            authentication: credential,
        });
        if !recorded.await {
            count(&self.metrics.signing_failures);
            return Err(Status::unavailable(
                "the audit log cannot be written, and --audit-required forbids certificates without a record; retry later",
            ));
        }
        count(&self.metrics.certificates_issued);
        if let Some(more) = self.issue_lines.take(&identity, Instant::now()) {
            info!(%id, not_after = ?signed.not_after, more, "certificate issued");
        }
        Ok(signed.chain)
    }
}

impl Signer for CertificateSigner {
    async fn create_certificate(
        &self,
        request: Request<IstioCertificateRequest>,
    ) -> Result<Vec<String>, Status> {
        count(&self.metrics.certificate_requests);
        let address = address(request.extensions());
        let issued = match self.sign(&request).await {
            Ok(pending) => self.issue(pending, &address).await,
            Err(status) => Err(status),
        };
        issued.inspect_err(|status| {
            let reason = status.message();
            if let Some(more) = self.refusal_lines.admit(Instant::now()) {
                warn!(address, reason, more, "certificate refused");
            }
            let (address, reason) = (ExternalText(&address), ExternalText(reason));
            self.audit.record(AuditEvent::CertificateRefused { address, reason, suppressed: 0 });
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const DAY: Duration = Duration::from_secs(24 * 3600);

    fn principal(account: &str, pod: Option<&str>) -> Principal {
        Principal::with_token(SpiffeId::new("mesh.example", "x", account), pod)
    }

    fn admitted(quota: &CertificateQuota, principal: &Principal, requests: usize, now: Instant) -> usize {
        (0..requests).filter(|_| quota.admit(principal, now).is_ok()).count()
    }

    #[test]
    fn renewals_and_restarts_of_replicas_stay_below_the_limit() {
        for lifetime in [1, 6, 10, 60, 3_600, 24 * 3_600].map(Duration::from_secs) {
            // A proxy waits for at least one second. Every second renewal, each pod also restarts.
            let renewal = (lifetime / 2).max(Duration::from_secs(1));
            for pod in [true, false] {
                let (quota, start) = (CertificateQuota::new(lifetime), Instant::now());
                let pods: Vec<_> = (0..500).map(|pod| format!("a-{pod}")).collect();
                let principals: Vec<_> =
                    pods.iter().map(|name| principal("a", pod.then_some(name))).collect();
                for round in 0..200 {
                    let now = start + renewal * round;
                    let requests = 1 + round as usize % 2;
                    for principal in &principals {
                        let admitted = admitted(&quota, principal, requests, now);
                        assert_eq!(admitted, requests, "{lifetime:?} {round} {pod}");
                    }
                }
            }
        }
    }

    #[test]
    fn a_caller_above_the_limit_is_refused_and_other_callers_are_not() {
        let (quota, start) = (CertificateQuota::new(DAY), Instant::now());
        assert_eq!(admitted(&quota, &principal("a", Some("a-1")), 50_000, start), 60);
        let refused = quota.admit(&principal("a", Some("a-1")), start).unwrap_err();
        assert_eq!(refused.code(), tonic::Code::ResourceExhausted);
        assert!(refused.message().starts_with("pod a-1 "), "{refused}");
        assert!(refused.message().ends_with("the limit is 60 at once and then 0.2 per second; retry in 5 s"));
        assert_eq!(admitted(&quota, &principal("a", Some("a-2")), 1, start), 1, "another pod of its account");
        assert_eq!(admitted(&quota, &principal("a", None), 50_000, start), 2_000);
        assert_eq!(admitted(&quota, &principal("b", None), 1, start), 1, "another account");
        let later = start + Duration::from_secs(10);
        assert_eq!(admitted(&quota, &principal("a", Some("a-1")), 50_000, later), 2);
        assert_eq!(admitted(&quota, &principal("a", None), 50_000, later), 500);
    }
}
