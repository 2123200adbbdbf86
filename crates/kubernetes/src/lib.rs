//! The API server of a Kubernetes cluster.
//!
//! [`ApiServer`] is the connection.
//!
//! | module | task |
//! |---|---|
//! | [`watch`] | objects and their changes |
//! | [`status`] | the status of objects |
//! | [`owned`] | objects that belong to another object |
//! | [`tokens`] | service account tokens |
//! | [`secrets`] | Secrets with the certificate authority |
//! | [`roots`] | the trust bundle in namespaces and webhooks |
//! | [`election`] | the leader of several replicas |

mod election;
mod owned;
mod roots;
mod secrets;
mod status;
mod tokens;
mod watch;

use std::{path::Path, time::Duration};

use kube::{
    Client, Config,
    config::{KubeConfigOptions, Kubeconfig},
};

pub use self::{
    election::Candidate,
    owned::{ObjectOwner, OwnedError},
    secrets::{SecretError, Secrets, StoredSecret},
    status::{ClusterObject, ObservedStatus, StatusWrite, Statuses, timestamp},
    tokens::{Review, TokenError, TokenIssuer},
    watch::{Cluster, WatchedKind},
};

/// Timeout of a response to a list, and of the pause between two events of a watch. It is longer than a watch lasts.
const READ_TIMEOUT: Duration = Duration::from_secs(300);
/// Timeout of the search for the kinds that the cluster serves.
const DISCOVERY_TIMEOUT: Duration = Duration::from_secs(30);

/// Name of the control plane as the owner of fields.
const FIELD_MANAGER: &str = "skysail";

/// Error of a connection to a cluster.
#[derive(Debug, thiserror::Error)]
pub enum ConnectError {
    /// The kubeconfig cannot be read.
    #[error("the kubeconfig cannot be used: {0}")]
    Kubeconfig(#[from] kube::config::KubeconfigError),
    /// Neither a kubeconfig nor a service account of a pod was found.
    #[error("no kubeconfig and no service account of a pod: {0}; set --kubeconfig or KUBECONFIG")]
    Infer(#[from] kube::config::InferConfigError),
    /// The API server did not say in time which kinds it serves.
    #[error("the API server at {server} did not say within {DISCOVERY_TIMEOUT:?} which kinds it serves")]
    Silent {
        /// Address of the API server.
        server: String,
    },
    /// The API server cannot be reached, or refuses the credential.
    #[error("the API server at {server}: {cause}")]
    Server {
        /// Address of the API server.
        server: String,
        /// Reason.
        #[source]
        cause: kube::Error,
    },
    /// The credential does not permit to list a kind.
    #[error("{kind} cannot be listed: {cause}; permit the service account to list and watch it")]
    Forbidden {
        /// Kind.
        kind: String,
        /// Reason.
        cause: String,
    },
}

/// Connection to an API server.
#[derive(Clone)]
pub struct ApiServer {
    client: Client,
    /// Its address, for messages.
    address: String,
}

impl ApiServer {
    /// Prepares a connection; the first request opens it. Without a kubeconfig, the first of these applies: that of the
    /// variable `KUBECONFIG`, the user's, the service account of the pod.
    ///
    /// # Errors
    /// The kubeconfig is unusable.
    pub async fn new(kubeconfig: Option<&Path>) -> Result<Self, ConnectError> {
        let options = KubeConfigOptions::default();
        let mut config = match kubeconfig {
            Some(file) => Config::from_custom_kubeconfig(Kubeconfig::read_from(file)?, &options).await?,
            // An unusable file is an error, and does not lead to another cluster.
            None if std::env::var_os("KUBECONFIG").is_some() => Config::from_kubeconfig(&options).await?,
            None => Config::infer().await?,
        };
        config.read_timeout = Some(READ_TIMEOUT);
        let address = config.cluster_url.to_string();
        match Client::try_from(config) {
            Ok(client) => Ok(Self { client, address }),
            Err(cause) => Err(ConnectError::Server { server: address, cause }),
        }
    }

    /// Returns the client for requests.
    pub fn client(&self) -> Client {
        self.client.clone()
    }
}
