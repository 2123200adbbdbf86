//! Secrets of a namespace that programs share: read, created, and replaced only in the version that was read.

use std::{collections::BTreeMap, time::Duration};

use futures_util::{StreamExt as _, stream};
use k8s_openapi::{ByteString, api::core::v1::Secret};
use kube::{
    Api,
    api::{ObjectMeta, PostParams},
    core::PartialObjectMeta,
    runtime::{WatchStreamExt as _, watcher},
};
use tokio::{sync::Notify, time::timeout};
use tracing::warn;

use crate::{ApiServer, watch::Failures};

/// Timeout of a request.
const TIMEOUT: Duration = Duration::from_secs(5);
const REPLACED: &str = "replaced";

/// Secrets of a namespace.
pub struct Secrets {
    api: Api<Secret>,
    metadata: Api<PartialObjectMeta<Secret>>,
    namespace: String,
    /// Address of the API server, for messages.
    server: String,
}

/// A Secret in one of its versions.
pub struct StoredSecret(Secret);

/// Error of a request about a Secret. Whether a write had an effect is unknown unless the API server refused it.
#[derive(Debug, thiserror::Error)]
pub enum SecretError {
    /// Another program was first.
    #[error("Secret {secret}: another program has changed it meanwhile")]
    Conflict {
        /// Namespace and name.
        secret: String,
    },
    /// The API server refuses the request.
    #[error(
        "Secret {secret} cannot be {verb}: the API server at {server} refuses it: {cause}; the service account needs get, list, watch, \
         create and update for Secrets of this namespace, which must exist"
    )]
    Refused {
        /// Namespace and name.
        secret: String,
        /// Requested operation: `read`, `created` or `replaced`.
        verb: &'static str,
        /// Address of the API server.
        server: String,
        /// Reason.
        cause: String,
    },
    /// The API server cannot be reached, or has an error.
    #[error("Secret {secret} cannot be {verb}: the API server at {server}: {cause}")]
    Server {
        /// Namespace and name.
        secret: String,
        /// Requested operation, as in [`Self::Refused`].
        verb: &'static str,
        /// Address of the API server.
        server: String,
        /// Reason.
        cause: String,
    },
    /// The API server does not answer.
    #[error("Secret {secret} cannot be {verb}: the API server at {server} did not answer within {TIMEOUT:?}")]
    Silent {
        /// Namespace and name.
        secret: String,
        /// Requested operation, as in [`Self::Refused`].
        verb: &'static str,
        /// Address of the API server.
        server: String,
    },
}

impl SecretError {
    /// Returns whether the request may succeed later without a change of the cluster's configuration.
    pub fn is_temporary(&self) -> bool {
        !matches!(self, Self::Refused { .. })
    }
}

impl StoredSecret {
    /// Returns the value of a key.
    pub fn get(&self, key: &str) -> Option<&[u8]> {
        self.0.data.as_ref()?.get(key).map(|value| value.0.as_slice())
    }
}

impl ApiServer {
    /// Returns access to the Secrets of a namespace.
    pub fn secrets(&self, namespace: &str) -> Secrets {
        Secrets {
            api: Api::namespaced(self.client(), namespace),
            metadata: Api::namespaced(self.client(), namespace),
            namespace: namespace.to_owned(),
            server: self.address.clone(),
        }
    }
}

impl Secrets {
    /// Returns the namespace and name of a Secret, for messages.
    pub fn full_name(&self, name: &str) -> String {
        format!("{}/{name}", self.namespace)
    }

    /// Reads the present version of a Secret; `None` if there is no such Secret.
    ///
    /// # Errors
    /// The API server says neither.
    pub async fn read(&self, name: &str) -> Result<Option<StoredSecret>, SecretError> {
        Ok(self.limited(name, "read", self.api.get_opt(name)).await?.map(StoredSecret))
    }

    /// Creates a Secret.
    ///
    /// # Errors
    /// There is one already, or it cannot be created.
    pub async fn create(
        &self,
        name: &str,
        kind: &str,
        values: BTreeMap<String, String>,
    ) -> Result<StoredSecret, SecretError> {
        let secret = Secret {
            metadata: ObjectMeta { name: Some(name.to_owned()), ..ObjectMeta::default() },
            type_: Some(kind.to_owned()),
            data: Some(bytes(values).collect()),
            ..Secret::default()
        };
        let created = async { self.api.create(&PostParams::default(), &secret).await };
        self.limited(name, "created", created).await.map(StoredSecret)
    }

    /// Replaces values of a Secret that has not changed since it was read. Other keys are kept.
    ///
    /// # Errors
    /// It has changed, or it cannot be replaced.
    pub async fn replace(
        &self,
        StoredSecret(known): &StoredSecret,
        values: BTreeMap<String, String>,
    ) -> Result<StoredSecret, SecretError> {
        // The API server refuses this version if there is a later one.
        let mut secret = known.clone();
        secret.data.get_or_insert_default().extend(bytes(values));
        let name = known.metadata.name.clone().unwrap_or_default();
        let replaced = async { self.api.replace(&name, &PostParams::default(), &secret).await };
        self.limited(&name, REPLACED, replaced).await.map(StoredSecret)
    }

    /// Notifies of changes of Secrets with these names, without end. Their contents are not read.
    pub async fn follow(&self, names: &[&str], changed: &Notify) {
        let watch = |name: &&str| {
            let of_name = watcher::Config::default().fields(&format!("metadata.name={name}"));
            watcher(self.metadata.clone(), of_name).default_backoff().boxed()
        };
        let mut events = stream::select_all(names.iter().map(watch));
        let mut failures = Failures::default();
        while let Some(event) = events.next().await {
            match event {
                Ok(_) => changed.notify_one(),
                Err(error) => failures.report(|| {
                    warn!(
                        %error, namespace = self.namespace, ?names,
                        "the watch of Secrets failed and is tried again; the service account needs list and watch for them"
                    );
                }),
            }
        }
    }

    /// Waits for an answer no longer than the timeout.
    async fn limited<T>(
        &self,
        name: &str,
        verb: &'static str,
        request: impl Future<Output = Result<T, kube::Error>>,
    ) -> Result<T, SecretError> {
        let (secret, server) = (self.full_name(name), self.server.clone());
        let (code, cause) = match timeout(TIMEOUT, request).await {
            Ok(Ok(answer)) => return Ok(answer),
            Ok(Err(kube::Error::Api(status))) => (status.code, status.message),
            Ok(Err(error)) => (0, with_causes(&error)),
            Err(_) => return Err(SecretError::Silent { secret, verb, server }),
        };
        Err(match code {
            409 => SecretError::Conflict { secret },
            // It was deleted.
            404 if verb == REPLACED => SecretError::Conflict { secret },
            408 | 429 => SecretError::Server { secret, verb, server, cause },
            400..=499 => SecretError::Refused { secret, verb, server, cause },
            _ => SecretError::Server { secret, verb, server, cause },
        })
    }
}

fn bytes(values: BTreeMap<String, String>) -> impl Iterator<Item = (String, ByteString)> {
    values.into_iter().map(|(key, value)| (key, ByteString(value.into_bytes())))
}

fn with_causes(error: &dyn std::error::Error) -> String {
    let causes = std::iter::successors(Some(error), |error| error.source());
    causes.map(ToString::to_string).collect::<Vec<_>>().join(": ")
}
