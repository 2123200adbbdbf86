//! Election of a leader by a Lease: the replica that writes where only one should.
//!
//! Every write of the Lease carries the version that was read, so two replicas cannot both acquire it. A replica compares no
//! clocks: it takes over a Lease that has not changed for its duration by its own clock. A leader stops when its last renewal,
//! from the moment it was sent, is as old as the deadline, which is 3 s before another one takes over.

use std::{convert::Infallible, time::Duration};

use k8s_openapi::{
    api::coordination::v1::{Lease, LeaseSpec},
    apimachinery::pkg::apis::meta::v1::{MicroTime, ObjectMeta},
    jiff::Timestamp,
};
use kube::{Api, api::PostParams};
use tokio::{
    sync::watch,
    time::{Instant, sleep_until, timeout_at},
};
use tracing::{info, warn};

use crate::{ApiServer, watch::Failures};

/// Time after the last renewal at which another replica takes over.
const DURATION: Duration = Duration::from_secs(8);
/// Interval of renewals and of attempts to acquire the Lease.
const INTERVAL: Duration = Duration::from_secs(2);
/// Timeout of a request.
const TIMEOUT: Duration = Duration::from_secs(2);
/// Time after the last renewal was sent at which a leader stops.
const DEADLINE: Duration = Duration::from_secs(5);

/// A candidate for leadership.
pub struct Candidate {
    api: Api<Lease>,
    name: String,
    /// Its identity, which no other replica has.
    identity: String,
    failures: Failures,
}

/// A Lease as it was read, and when it was first read in this version.
struct Seen {
    version: String,
    since: Instant,
}

impl ApiServer {
    /// Returns a candidate for the leadership of the Lease of a namespace. No other replica has its identity.
    pub fn candidate(&self, namespace: &str, lease: &str, identity: &str) -> Candidate {
        Candidate {
            api: Api::namespaced(self.client(), namespace),
            name: lease.to_owned(),
            identity: identity.to_owned(),
            failures: Failures::default(),
        }
    }
}

impl Candidate {
    /// Stands for election without end. `leads` tells whether this replica is the leader.
    pub async fn run(mut self, leads: watch::Sender<bool>) -> Infallible {
        let (mut seen, mut stop) = (None, None::<Instant>);
        loop {
            let begun = Instant::now();
            let end = stop.map_or(begun + TIMEOUT, |stop| stop.min(begun + TIMEOUT));
            match timeout_at(end, self.attempt(&mut seen)).await {
                Ok(Ok(true)) => stop = Some(begun + DEADLINE),
                Ok(Ok(false)) => stop = None,
                Ok(Err(error)) => self.report(&error.to_string()),
                Err(_) => self.report(&format!("no answer within {:?}", end - begun)),
            }
            let next = begun + INTERVAL;
            stop = stop.filter(|stop| *stop > Instant::now());
            self.tell(&leads, stop.is_some());
            if let Some(last) = stop.filter(|stop| *stop < next) {
                sleep_until(last).await;
                stop = None;
                self.tell(&leads, false);
            }
            sleep_until(next).await;
        }
    }

    fn tell(&self, leads: &watch::Sender<bool>, is_leader: bool) {
        if leads.send_if_modified(|leads| std::mem::replace(leads, is_leader) != is_leader) {
            info!(lease = self.name, identity = self.identity, is_leader, "leadership");
        }
    }

    fn report(&mut self, error: &str) {
        let lease = &self.name;
        self.failures.report(|| {
            warn!(error, lease, "the Lease cannot be renewed; another replica may become the leader");
        });
    }

    /// Acquires or renews the Lease. Returns whether this replica holds it.
    async fn attempt(&self, seen: &mut Option<Seen>) -> Result<bool, kube::Error> {
        let Some(mut lease) = self.api.get_opt(&self.name).await? else {
            let metadata = ObjectMeta { name: Some(self.name.clone()), ..ObjectMeta::default() };
            let lease = Lease { metadata, spec: Some(self.held(None)) };
            return won(self.api.create(&PostParams::default(), &lease).await);
        };
        let version = lease.metadata.resource_version.clone().unwrap_or_default();
        if seen.as_ref().is_none_or(|seen| seen.version != version) {
            *seen = Some(Seen { version, since: Instant::now() });
        }
        let holder = lease.spec.as_ref().and_then(|spec| spec.holder_identity.as_deref()).unwrap_or_default();
        let is_free = holder.is_empty() || seen.as_ref().is_some_and(|seen| seen.since.elapsed() >= DURATION);
        if holder != self.identity && !is_free {
            return Ok(false);
        }
        lease.spec = Some(self.held(lease.spec.as_ref()));
        won(self.api.replace(&self.name, &PostParams::default(), &lease).await)
    }

    /// Returns the Lease as this replica holds it.
    fn held(&self, before: Option<&LeaseSpec>) -> LeaseSpec {
        let now = Some(MicroTime(Timestamp::now()));
        let own = before.filter(|spec| spec.holder_identity.as_deref() == Some(&self.identity));
        let transitions = before.and_then(|spec| spec.lease_transitions).unwrap_or_default();
        LeaseSpec {
            holder_identity: Some(self.identity.clone()),
            lease_duration_seconds: i32::try_from(DURATION.as_secs()).ok(),
            acquire_time: own.map_or_else(|| now.clone(), |spec| spec.acquire_time.clone()),
            renew_time: now,
            lease_transitions: Some(transitions + i32::from(before.is_some() && own.is_none())),
            ..LeaseSpec::default()
        }
    }

    /// Gives the Lease up, if this replica holds it, so that another one takes over at once.
    ///
    /// # Errors
    /// The API server does not take the change.
    pub async fn release(&self) -> Result<(), kube::Error> {
        let Some(mut lease) = self.api.get_opt(&self.name).await? else { return Ok(()) };
        let Some(spec) = lease.spec.as_mut() else { return Ok(()) };
        if spec.holder_identity.as_deref() == Some(&self.identity) {
            spec.holder_identity = None;
            self.api.replace(&self.name, &PostParams::default(), &lease).await?;
        }
        Ok(())
    }
}

/// Returns whether a write succeeded. A conflict means that another replica was first.
fn won(result: Result<Lease, kube::Error>) -> Result<bool, kube::Error> {
    match result {
        Ok(_) => Ok(true),
        Err(kube::Error::Api(status)) if status.code == 409 => Ok(false),
        Err(error) => Err(error),
    }
}
