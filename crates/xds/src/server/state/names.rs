//! The names that a stream asks for.

use std::sync::Arc;

/// Names, each once. There may be thousands, in thousands of sessions, so they are kept as tight as can be, and shared where
/// they are all that there are.
#[derive(Debug, Default, PartialEq)]
pub(super) struct Names(pub(super) Arc<[Arc<str>]>);

impl Names {
    pub(super) fn contains(&self, name: &str) -> bool {
        self.0.binary_search_by(|known| (**known).cmp(name)).is_ok()
    }

    /// Adds names, some of which may be there.
    pub(super) fn extend(&mut self, names: impl IntoIterator<Item = Arc<str>>) {
        let mut all: Vec<Arc<str>> = names.into_iter().collect();
        if !all.is_empty() {
            all.extend(self.0.iter().cloned());
            all.sort_unstable();
            all.dedup();
            self.0 = all.into();
        }
    }

    pub(super) fn retain(&mut self, keep: impl Fn(&str) -> bool) {
        if !self.0.iter().all(|name| keep(name)) {
            self.0 = self.0.iter().filter(|name| keep(name)).cloned().collect();
        }
    }
}
