//! Key sets of token issuers: the list of sets to fetch, and the publication of fetched sets.

use std::{collections::BTreeMap, sync::Arc};

use skysail_model::{KeyFetch, KeySource};
use tokio::sync::watch;

use super::Publisher;

/// Key sets to fetch, and the policies that use them.
pub(crate) type KeyFetches = BTreeMap<KeySource, KeyFetch>;

impl Publisher {
    /// Enables fetches of key sets. The receiver yields what to fetch.
    pub(crate) fn with_key_fetches(mut self) -> (Self, watch::Receiver<Arc<KeyFetches>>) {
        let (sender, receiver) = watch::channel(Arc::default());
        self.key_fetches = Some(sender);
        (self, receiver)
    }

    /// Sends the key sets to fetch to the fetcher, if they have changed.
    pub(super) fn send_key_fetches(&self) {
        let Some(key_fetches) = &self.key_fetches else { return };
        let current = Arc::new(self.read().world.key_fetches());
        key_fetches.send_if_modified(|before| {
            let has_changed = *before != current;
            *before = current;
            has_changed
        });
    }

    /// Applies fetched key sets and publishes them. Blocks during the compilation.
    pub(crate) fn set_key_sets(&self, sets: Vec<(KeySource, Option<Arc<str>>)>) {
        self.change_world(|world| {
            sets.into_iter()
                .fold(false, |changed, (source, keys)| world.set_key_set(&source, keys) || changed)
        });
    }
}
