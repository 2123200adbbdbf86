//! Signs certificate requests of workloads for their authenticated identity.

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
    authentication::{Authentication, Caller, Grant, Proof, caller},
    authority::Keeper,
    bucket::{Buckets, Rate},
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
    quota: Quota,
    refused: Throttle,
    issued: Buckets,
}

/// Log lines about certificates of one identity; the audit log has all of them.
const LINES: Rate = Rate { burst: 100.0, each_second: 1.0 };

/// How many certificates each caller may have.
///
/// A proxy renews its certificate after half of its lifetime or later, so each pod may have four in a lifetime, which leaves room for
/// restarts and new roots. The least rates allow for clients that ask for short lifetimes, or try again after failures.
struct Quota {
    /// Of one pod, where the credential names it.
    pods: Buckets,
    /// Of all workloads of an identity whose credentials name no pod.
    identities: Buckets,
}

impl Quota {
    /// The quota for certificates of this lifetime.
    fn new(lifetime: Duration) -> Self {
        const REPLICAS: f64 = 1_000.0;
        let renewals = 4.0 / lifetime.as_secs_f64();
        let pods = Rate { burst: 60.0, each_second: renewals.max(0.2) };
        let identities = Rate { burst: 2.0 * REPLICAS, each_second: (REPLICAS * renewals).max(50.0) };
        Self { pods: Buckets::new(pods), identities: Buckets::new(identities) }
    }

    /// Counts a request; fails if its pod, or its identity, has made too many.
    fn admit(&self, proof: &Proof, now: Instant) -> Result<(), Status> {
        let (whose, buckets) = match &proof.pod {
            Some(pod) => (format!("pod {} {} of {}", pod.name, pod.uid, proof.id), &self.pods),
            None => (proof.id.to_string(), &self.identities),
        };
        if buckets.take(&whose, now).is_some() {
            return Ok(());
        }
        let Rate { burst, each_second } = buckets.rate();
        let pause = each_second.recip().ceil();
        Err(Status::resource_exhausted(format!(
            "{whose} asks for too many certificates: {burst} at once and then {each_second:.1} per second are the limit; \
             try again in {pause} s"
        )))
    }
}

/// A certificate that may be handed out once it is on record.
struct Issued {
    signed: Signed,
    id: SpiffeId,
    /// Credential that proved the identity.
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
        let (refused, issued) = (Throttle::new(Duration::from_secs(1)), Buckets::new(LINES));
        Self {
            keeper,
            authentication,
            lifetime,
            metrics,
            audit,
            quota: Quota::new(lifetime),
            refused,
            issued,
        }
    }

    fn sign(&self, call: &Request<IstioCertificateRequest>) -> Result<Issued, Status> {
        let Caller::Proven(proof) = caller(call.extensions())? else {
            return Err(Status::unauthenticated("certificates are signed on the TLS port only"));
        };
        self.quota
            .admit(&proof, Instant::now())
            .inspect_err(|_| count(&self.metrics.certificates_over_quota))?;
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
        if let Some(more) = self.issued.take(&identity, Instant::now()) {
            info!(%id, not_after = ?signed.not_after, more, "certificate issued");
        }
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
            if let Some(more) = self.refused.admit(Instant::now()) {
                warn!(address, reason, more, "certificate refused");
            }
            let (address, reason) = (Text(&address), Text(reason));
            self.audit.record(Event::CertificateRefused { address, reason, suppressed: 0 });
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const DAY: Duration = Duration::from_secs(24 * 3600);

    fn proof(account: &str, pod: Option<&str>) -> Proof {
        Proof::by_token(SpiffeId::new("mesh.example", "x", account), pod)
    }

    fn admitted(quota: &Quota, proof: &Proof, asked: usize, now: Instant) -> usize {
        (0..asked).filter(|_| quota.admit(proof, now).is_ok()).count()
    }

    #[test]
    fn replicas_that_renew_and_restart_are_never_refused() {
        for lifetime in [1, 6, 10, 60, 3_600, 24 * 3_600].map(Duration::from_secs) {
            // The proxy waits for a second at least; a pod is restarted once in two renewals.
            let renewal = (lifetime / 2).max(Duration::from_secs(1));
            for pod in [true, false] {
                let (quota, start) = (Quota::new(lifetime), Instant::now());
                let pods: Vec<_> = (0..500).map(|pod| format!("a-{pod}")).collect();
                let proofs: Vec<_> = pods.iter().map(|name| proof("a", pod.then_some(name))).collect();
                for round in 0..200 {
                    let now = start + renewal * round;
                    let asked = 1 + round as usize % 2;
                    for proof in &proofs {
                        assert_eq!(admitted(&quota, proof, asked, now), asked, "{lifetime:?} {round} {pod}");
                    }
                }
            }
        }
    }

    #[test]
    fn a_caller_that_asks_without_end_gets_a_burst_and_then_few() {
        let (quota, start) = (Quota::new(DAY), Instant::now());
        assert_eq!(admitted(&quota, &proof("a", Some("a-1")), 50_000, start), 60);
        let refused = quota.admit(&proof("a", Some("a-1")), start).unwrap_err();
        assert_eq!(refused.code(), tonic::Code::ResourceExhausted);
        assert!(refused.message().starts_with("pod a-1 "), "{refused}");
        assert!(
            refused.message().ends_with("60 at once and then 0.2 per second are the limit; try again in 5 s")
        );
        assert_eq!(admitted(&quota, &proof("a", Some("a-2")), 1, start), 1, "another pod of its account");
        assert_eq!(admitted(&quota, &proof("a", None), 50_000, start), 2_000);
        assert_eq!(admitted(&quota, &proof("b", None), 1, start), 1, "another account");
        let later = start + Duration::from_secs(10);
        assert_eq!(admitted(&quota, &proof("a", Some("a-1")), 50_000, later), 2);
        assert_eq!(admitted(&quota, &proof("a", None), 50_000, later), 500);
    }
}
