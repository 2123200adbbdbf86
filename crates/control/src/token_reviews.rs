//! Confirms service account tokens by the API server of the cluster (TokenReview): a token also ends with its pod, with
//! its service account, and when it is revoked.
//!
//! Only tokens whose signature is already verified are sent, so a stranger causes no requests. Without a verdict, because
//! the API server is away, the signature and the pods that are known decide alone.

use std::{
    collections::HashMap,
    sync::{Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

use skysail_core::{SpiffeId, logging::Throttle, names::TOKEN_AUDIENCE};
use skysail_identity::sha256;
use skysail_kubernetes::{ApiServer, Review};
use tokio::sync::Semaphore;
use tonic::Status;
use tracing::warn;

/// Time for which a verdict holds, also while the API server is away.
const VALIDITY: Duration = Duration::from_secs(60);
/// Maximum number of verdicts that are kept.
const MAX_VERDICTS: usize = 65_536;
/// Number of concurrent requests. Further ones wait.
const REQUESTS: usize = 64;
/// Time after a missing verdict in which the API server is not asked. Otherwise all callers would wait for its timeout.
const PAUSE: Duration = Duration::from_secs(5);
/// Interval of messages about missing verdicts.
const MESSAGE_INTERVAL: Duration = Duration::from_secs(60);

/// Reviews of tokens.
pub(crate) struct TokenReviews {
    server: ApiServer,
    /// Verdicts by the hash of the token.
    verdicts: Mutex<HashMap<String, Verdict>>,
    requests: Semaphore,
    /// End of the time in which the API server is not asked.
    paused_until: Mutex<Option<Instant>>,
    missing_lines: Throttle,
}

impl TokenReviews {
    pub(crate) fn new(server: ApiServer) -> Self {
        Self {
            server,
            verdicts: Mutex::default(),
            requests: Semaphore::new(REQUESTS),
            paused_until: Mutex::default(),
            missing_lines: Throttle::new(MESSAGE_INTERVAL),
        }
    }

    /// Confirms a token of a service account, whose signature was verified before.
    ///
    /// # Errors
    /// The API server refuses the token, or knows it as that of another user.
    pub(crate) async fn confirm(&self, token: &str, id: &SpiffeId) -> Result<(), Status> {
        let key = sha256(token.as_bytes());
        if let Some(verdict) = self.known(&key) {
            return verdict;
        }
        let _permit = self.requests.acquire().await;
        // An equal request may have been answered meanwhile, or the API server may be away.
        if let Some(verdict) = self.known(&key) {
            return verdict;
        }
        let user = format!("system:serviceaccount:{}:{}", id.namespace, id.service_account);
        let refusal = match self.server.review(token, TOKEN_AUDIENCE).await {
            Ok(Review::Valid(name)) if name == user => None,
            Ok(Review::Valid(name)) => {
                Some(format!("the API server knows the token as that of {name:?}, but it names {user}"))
            }
            Ok(Review::Refused(reason)) => Some(format!("the API server refuses the token: {reason}")),
            Err(error) => {
                *lock(&self.paused_until) = Some(Instant::now() + PAUSE);
                if let Some(more) = self.missing_lines.admit(Instant::now()) {
                    let error = error.to_string();
                    warn!(error, more, "tokens are accepted by their signature alone, without a TokenReview");
                }
                return Ok(());
            }
        };
        self.keep(key, refusal.clone(), Instant::now());
        refusal.map_or(Ok(()), |reason| Err(Status::unauthenticated(reason)))
    }

    /// Returns the verdict on a token without a request; `None`: the API server is to be asked.
    fn known(&self, key: &str) -> Option<Result<(), Status>> {
        let now = Instant::now();
        match lock(&self.verdicts).get(key).filter(|verdict| verdict.until > now) {
            Some(Verdict { refusal: Some(reason), .. }) => Some(Err(Status::unauthenticated(reason.clone()))),
            Some(_) => Some(Ok(())),
            None => lock(&self.paused_until).is_some_and(|until| until > now).then_some(Ok(())),
        }
    }

    fn keep(&self, key: String, refusal: Option<String>, now: Instant) {
        let mut verdicts = lock(&self.verdicts);
        if verdicts.len() >= MAX_VERDICTS {
            verdicts.retain(|_, verdict| verdict.until > now);
        }
        if verdicts.len() < MAX_VERDICTS {
            verdicts.insert(key, Verdict { until: now + VALIDITY, refusal });
        }
    }
}

/// Verdict on a token.
struct Verdict {
    until: Instant,
    /// Reason of a refusal.
    refusal: Option<String>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
