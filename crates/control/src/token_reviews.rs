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

/// Time for which a verdict holds.
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
    /// End of the verdict that a token is valid, by the hash of the token.
    valid_until: Mutex<HashMap<String, Instant>>,
    requests: Semaphore,
    /// End of the time in which the API server is not asked.
    paused_until: Mutex<Option<Instant>>,
    missing_lines: Throttle,
}

impl TokenReviews {
    pub(crate) fn new(server: ApiServer) -> Self {
        Self {
            server,
            valid_until: Mutex::default(),
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
        let is_decided = || self.is_paused() || self.is_valid(&key);
        if is_decided() {
            return Ok(());
        }
        let _permit = self.requests.acquire().await;
        // An equal request may have been answered meanwhile, or the API server may be away.
        if is_decided() {
            return Ok(());
        }
        let user = format!("system:serviceaccount:{}:{}", id.namespace, id.service_account);
        match self.server.review(token, TOKEN_AUDIENCE).await {
            Ok(Review::Valid(name)) if name == user => {
                self.keep(key, Instant::now());
                Ok(())
            }
            Ok(Review::Valid(name)) => Err(Status::unauthenticated(format!(
                "the API server knows the token as that of {name:?}, but it names {user}"
            ))),
            Ok(Review::Refused(reason)) => {
                Err(Status::unauthenticated(format!("the API server refuses the token: {reason}")))
            }
            Err(error) => {
                *lock(&self.paused_until) = Some(Instant::now() + PAUSE);
                if let Some(more) = self.missing_lines.admit(Instant::now()) {
                    let error = error.to_string();
                    warn!(error, more, "tokens are accepted by their signature alone, without a TokenReview");
                }
                Ok(())
            }
        }
    }

    fn is_paused(&self) -> bool {
        lock(&self.paused_until).is_some_and(|until| until > Instant::now())
    }

    fn is_valid(&self, key: &str) -> bool {
        lock(&self.valid_until).get(key).is_some_and(|until| *until > Instant::now())
    }

    fn keep(&self, key: String, now: Instant) {
        let mut verdicts = lock(&self.valid_until);
        if verdicts.len() >= MAX_VERDICTS {
            verdicts.retain(|_, until| *until > now);
        }
        if verdicts.len() < MAX_VERDICTS {
            verdicts.insert(key, now + VALIDITY);
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
