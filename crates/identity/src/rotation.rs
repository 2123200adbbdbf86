//! Self-signed authority, and the rotation of its root without failing requests.
//!
//! | step | signs | trusted | ends |
//! |---|---|---|---|
//! | settled | the root | the root | when the root nears its end, or on request |
//! | distribute | the root | the root and the next root | when every workload has renewed and received both roots |
//! | issue | the next root | both | when all certificates of the former root have expired |
//! | retire | the new root | the new root | when every workload has renewed and dropped the former root |
//!
//! Workloads receive the trust bundle with each certificate, so a rotation needs only their normal renewals.
//! It works for Istio's agents too. A step lasts for the lifetime of a certificate plus a margin for slow
//! clocks. Every certificate that is valid at the end of a step was issued after the step began. Distribute
//! ends earlier if too little of the root's lifetime is left (`latest_switch`).
//!
//! [`SelfSigned`] is the state in memory. It computes the next state, and the caller stores that state before it uses
//! it: in a directory ([`folder`]) or in a Secret of a cluster ([`secret`]). So a process can continue after a crash at any moment. A root that has
//! expired by the clock is not replaced, because the clock may be wrong and the key would be lost.

pub mod folder;
pub mod secret;

use std::time::{Duration, SystemTime};

use serde::{Deserialize, Serialize};

use crate::{
    Authority, Error,
    authority::{Root, margin},
    cacerts::{RootInfo, describe_root},
    identity::{certificates, describe},
};

/// Name of the stored state.
const STATE: &str = "authority.json";
/// Minimum lifetime of a root, in lifetimes of certificates.
const MIN_LIFETIMES: u32 = 10;
/// Maximum lifetime of certificates in a stored state, and the longest time until they have expired: 200 years.
const MAX_LIFETIME: Duration = Duration::from_secs(200 * 365 * 24 * 3600);

/// Lifetimes of certificates.
#[derive(Clone, Copy, Debug)]
pub struct Lifetimes {
    /// Maximum lifetime of workload certificates.
    pub certificate: Duration,
    /// Lifetime of a root.
    pub root: Duration,
}

/// Step of a rotation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Step {
    /// There is one root.
    Settled,
    /// The next root is trusted but does not sign yet.
    Distribute,
    /// The next root signs, and the former one is still trusted.
    Issue,
    /// The former root is no longer trusted.
    Retire,
}

impl Step {
    /// All steps, in order.
    pub const ALL: [Self; 4] = [Self::Settled, Self::Distribute, Self::Issue, Self::Retire];

    /// Returns the name of the step.
    pub fn name(self) -> &'static str {
        match self {
            Self::Settled => "settled",
            Self::Distribute => "distribute",
            Self::Issue => "issue",
            Self::Retire => "retire",
        }
    }

    /// Returns the condition that ends the step, for users.
    pub fn waits_for(self) -> &'static str {
        match self {
            Self::Settled => "the root to approach its expiry",
            Self::Distribute => "every workload to renew its certificate and receive the next root",
            Self::Issue => "the last certificate of the former root to expire",
            Self::Retire => "every workload to renew its certificate and remove the former root",
        }
    }
}

/// A self-signed authority in a step of its rotation.
#[derive(Clone, PartialEq)]
pub struct SelfSigned {
    /// Lifetime of the next root.
    root_lifetime: Duration,
    state: State,
}

/// Stored state.
#[derive(Clone, PartialEq, Serialize, Deserialize)]
struct State {
    step: Step,
    since: SystemTime,
    /// Earliest end of the step.
    until: SystemTime,
    signing: Root,
    /// Next root, during [`Step::Distribute`].
    next: Option<Root>,
    /// Certificate of the former root, during [`Step::Issue`] and [`Step::Retire`].
    former: Option<String>,
    /// Lifetime of certificates that are signed now.
    lifetime: Duration,
    /// Time by which all certificates with a former, longer lifetime have expired.
    longer_until: SystemTime,
}

impl Lifetimes {
    /// Checks that a root lives long enough for its rotation.
    fn check(&self) -> Result<(), Error> {
        let Self { certificate, root } = *self;
        if root >= certificate * MIN_LIFETIMES {
            return Ok(());
        }
        let problem = format!(
            "a root must live at least {MIN_LIFETIMES} times as long as certificates; {root:?} and {certificate:?} were requested"
        );
        Err(Error::Authority { file: STATE, problem })
    }
}

impl SelfSigned {
    /// Returns an authority with a new root.
    ///
    /// # Errors
    /// The lifetimes are inconsistent.
    pub fn create(lifetimes: Lifetimes, now: SystemTime) -> Result<Self, Error> {
        lifetimes.check()?;
        let root = Root::generate(lifetimes.root, now)?;
        Ok(Self { root_lifetime: lifetimes.root, state: State::settled(root, lifetimes.certificate, now)? })
    }

    /// Returns the authority of a stored state.
    ///
    /// # Errors
    /// The lifetimes are inconsistent. The text is no valid state.
    pub fn from_text(text: &str, lifetimes: Lifetimes) -> Result<Self, Error> {
        lifetimes.check()?;
        Ok(Self { root_lifetime: lifetimes.root, state: State::parse(text)? })
    }

    /// Returns the state for storage. It contains keys.
    ///
    /// # Errors
    /// None in practice: every state can be encoded.
    pub fn to_text(&self) -> Result<String, Error> {
        serde_json::to_string_pretty(&self.state).map_err(|error| Error::Key(error.to_string()))
    }

    /// Returns the authority with another lifetime of the certificates that are signed from now on.
    #[must_use]
    pub fn with_lifetime(mut self, lifetime: Duration, now: SystemTime) -> Self {
        if lifetime < self.state.lifetime {
            self.state.longer_until = self.state.longer_until.max(now + self.state.lifetime);
        }
        self.state.lifetime = lifetime;
        self
    }

    /// Fails if the signing root has expired by the clock.
    ///
    /// # Errors
    /// It has expired.
    pub fn check_alive(&self, now: SystemTime) -> Result<(), Error> {
        self.state.check_alive(now)
    }

    /// Returns the authority in its current step.
    ///
    /// # Errors
    /// Its root has expired.
    pub fn authority(&self) -> Result<Authority, Error> {
        Authority::of_root(&self.state.signing, self.other().as_slice())
    }

    /// Returns the certificate that is trusted in addition to the signing one.
    fn other(&self) -> Option<&str> {
        match self.state.step {
            Step::Distribute => self.state.next.as_ref().map(|root| &*root.certificate),
            Step::Issue => self.state.former.as_deref(),
            Step::Settled | Step::Retire => None,
        }
    }

    /// Returns the lifetime of the certificates that are signed now.
    pub fn lifetime(&self) -> Duration {
        self.state.lifetime
    }

    /// Returns the current step.
    pub fn step(&self) -> Step {
        self.state.step
    }

    /// Returns the start of the current step.
    pub fn since(&self) -> SystemTime {
        self.state.since
    }

    /// Returns the earliest end of the current step.
    pub fn until(&self) -> SystemTime {
        self.state.until
    }

    /// Returns the former root during [`Step::Retire`].
    ///
    /// # Errors
    /// None in practice, because the certificate was parsed before.
    pub fn retired(&self) -> Result<Option<RootInfo>, Error> {
        let retired = self.state.former.as_ref().filter(|_| self.state.step == Step::Retire);
        let Some(pem) = retired else { return Ok(None) };
        let certificates = certificates(pem.as_bytes(), STATE)?;
        let (_, parsed) = x509_parser::parse_x509_certificate(&certificates[0])
            .map_err(|error| Error::Certificate(error.to_string()))?;
        Ok(Some(describe_root(&parsed, false)))
    }

    /// Returns the trust bundle (PEM): the signing root first.
    pub fn roots_pem(&self) -> String {
        std::iter::once(&*self.state.signing.certificate).chain(self.other()).collect()
    }

    /// Returns the first step of a rotation; `None` if one is in progress.
    ///
    /// # Errors
    /// The root has expired by the clock.
    pub fn rotated(&self, now: SystemTime) -> Result<Option<Self>, Error> {
        self.state.check_alive(now)?;
        if self.state.step != Step::Settled {
            return Ok(None);
        }
        let next = Some(Root::generate(self.root_lifetime, now)?);
        let state = self.state.clone();
        let until = state.renewed(now).min(state.latest_switch(now)?);
        let state = State { step: Step::Distribute, since: now, until, next, ..state };
        Ok(Some(Self { state, ..*self }))
    }

    /// Returns the next step if the current one has ended, else `None`.
    ///
    /// # Errors
    /// The root has expired by the clock.
    pub fn advanced(&self, now: SystemTime) -> Result<Option<Self>, Error> {
        self.state.check_alive(now)?;
        if now < self.state.until {
            return Ok(None);
        }
        let state = State { since: now, until: self.state.renewed(now), ..self.state.clone() };
        let state = match (state.step, state.next.clone()) {
            (Step::Distribute, Some(next)) => {
                let former = Some(state.signing.certificate);
                State { step: Step::Issue, signing: next, next: None, former, ..state }
            }
            (Step::Issue, _) => State { step: Step::Retire, ..state },
            (Step::Retire, _) => {
                let longer_until = state.longer_until;
                State { longer_until, ..State::settled(state.signing, state.lifetime, now)? }
            }
            (Step::Settled | Step::Distribute, _) => return self.rotated(now),
        };
        Ok(Some(Self { state, ..*self }))
    }
}

impl State {
    fn parse(text: &str) -> Result<Self, Error> {
        let invalid = |problem: String| Error::Authority {
            file: STATE,
            problem: format!("it cannot be read: {problem}"),
        };
        let state: Self = serde_json::from_str(text).map_err(|error| invalid(error.to_string()))?;
        let is_complete = match state.step {
            Step::Settled => true,
            Step::Distribute => state.next.is_some(),
            Step::Issue | Step::Retire => state.former.is_some(),
        };
        if !is_complete {
            return Err(invalid(format!("step {} lacks the other root", state.step.name())));
        }
        // Sums with the present time must not overflow.
        if state.lifetime.max(state.longer_until.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default())
            > MAX_LIFETIME
        {
            return Err(invalid("lifetime and longer_until are at most 200 years".to_owned()));
        }
        Ok(state)
    }

    fn settled(signing: Root, lifetime: Duration, now: SystemTime) -> Result<Self, Error> {
        let (begin, end) = validity(&signing.certificate)?;
        let life = end.duration_since(begin).unwrap_or_default();
        // Time for all steps, plus one step as a reserve.
        let before = (life / 5).max(4 * (lifetime + slack(lifetime)));
        Ok(Self {
            step: Step::Settled,
            since: now,
            until: end - before,
            signing,
            next: None,
            former: None,
            lifetime,
            longer_until: now,
        })
    }

    /// Fails if the signing root has expired by the clock.
    fn check_alive(&self, now: SystemTime) -> Result<(), Error> {
        let (_, end) = validity(&self.signing.certificate)?;
        if now < end {
            return Ok(());
        }
        let time = |time: SystemTime| {
            time::OffsetDateTime::from(time).replace_nanosecond(0).unwrap_or(time::OffsetDateTime::UNIX_EPOCH)
        };
        let problem = format!(
            "its root has expired: at {} UTC, and this machine's clock says {} UTC. If the clock is wrong, set it. If it is right, move \
             authority.json and root-cert.pem away, or end all control planes and delete the Secret, for a new root, which workloads \
             trust after their next certificate",
            time(end),
            time(now)
        );
        Err(Error::Authority { file: STATE, problem })
    }

    /// Returns the time by which every certificate signed before `now` has expired.
    fn renewed(&self, now: SystemTime) -> SystemTime {
        (now + self.lifetime).max(self.longer_until) + slack(self.lifetime)
    }

    /// Returns the latest time for the next root to begin to sign. It comes before the end of this step if
    /// the signing root was made for shorter lifetimes. At that time the signing root is still valid. Its
    /// certificates expire no later than the root itself, and workloads have renewed them.
    fn latest_switch(&self, now: SystemTime) -> Result<SystemTime, Error> {
        let (_, end) = validity(&self.signing.certificate)?;
        Ok(now + end.duration_since(now).unwrap_or_default() * 4 / 5)
    }
}

/// Margin for slow clocks, and for the whole seconds of certificates.
fn slack(lifetime: Duration) -> Duration {
    margin(lifetime) + Duration::from_secs(1)
}

fn validity(pem: &str) -> Result<(SystemTime, SystemTime), Error> {
    let certificates = certificates(pem.as_bytes(), STATE)?;
    let first = certificates.first().ok_or(Error::Certificate("none".into()))?;
    describe(first).map(|(_, begin, end)| (begin, end))
}

#[cfg(test)]
mod tests;
