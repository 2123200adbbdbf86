//! The volumes of a running pod: updates of their files, and renewal of tokens.

use std::cell::RefCell;

use skysail_identity::TOKEN_RENEWAL;
use tokio::sync::watch;

use super::{PodConfig, set_waiting, write_token};
use crate::{
    readiness::{self, ProgramStatuses},
    volumes::{Contents, store::Store},
};

/// Volumes of a pod, and the objects for which they wait.
pub(super) struct Volumes {
    store: RefCell<(Store, Contents)>,
    waits: watch::Sender<Result<(), String>>,
}

impl Volumes {
    pub(super) fn new(pod: &PodConfig, store: Store) -> Self {
        let store = RefCell::new((store, pod.contents.clone()));
        let volumes = Self { store, waits: watch::Sender::new(Ok(())) };
        volumes.write(pod);
        volumes
    }

    pub(super) fn replace(&self, pod: &PodConfig, contents: Contents) {
        self.store.borrow_mut().1 = contents;
        self.write(pod);
    }

    fn write(&self, pod: &PodConfig) {
        let (store, contents) = &mut *self.store.borrow_mut();
        let (namespace, name) = &pod.key;
        let token = |audience: &str| pod.signer.token(namespace, &pod.account, name, audience);
        let _before = self.waits.send_replace(store.write(contents, token));
    }

    /// Waits until all volumes have their files. Sets the reason for which the containers wait meanwhile.
    pub(super) async fn mounted(&self, pod: &PodConfig, statuses: &ProgramStatuses) {
        let mut waits = self.waits.subscribe();
        let mut has_waited = false;
        loop {
            let Err(reason) = waits.borrow_and_update().clone() else { break };
            has_waited = true;
            set_waiting(pod, statuses, &format!("ContainerCreating: {reason}"));
            if waits.changed().await.is_err() {
                return;
            }
        }
        if has_waited {
            set_waiting(pod, statuses, readiness::STARTING);
        }
    }
}

/// Renews the tokens of a pod, in its folder and in its volumes. Does not return.
pub(super) async fn renew_tokens(pod: &PodConfig, volumes: &Volumes) {
    loop {
        tokio::time::sleep(TOKEN_RENEWAL).await;
        volumes.write(pod);
        if let Err(error) = write_token(pod) {
            tracing::warn!(pod = pod.key.1, %error, "the service account token is not renewed");
        }
    }
}
