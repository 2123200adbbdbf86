//! Checks of workloads: missing service accounts.

use super::{ObjectReport, Report};
use crate::{analysis::Code, api::Template, world::store::Entry};

/// Service account that Kubernetes creates in every namespace.
const DEFAULT_ACCOUNT: &str = "default";

impl Report<'_> {
    /// Reports service accounts that do not exist; a cluster starts no pod with one.
    pub(super) fn service_accounts(&mut self) {
        let world = self.world;
        for entry in world.templates.values().flat_map(|templates| templates.iter()) {
            let (namespace, account) = (&entry.object.meta.namespace, &entry.object.spec.service_account);
            if account != DEFAULT_ACCOUNT && world.service_accounts.get(namespace, account).is_none() {
                self.account_missing(entry, account);
            }
        }
    }

    fn account_missing(&mut self, entry: &Entry<Template>, account: &str) {
        let kind = entry.object.spec.kind;
        let message = format!(
            "there is no ServiceAccount {account:?} in namespace {}, and a cluster starts no pod without it",
            entry.object.meta.namespace
        );
        let remedy = "add a ServiceAccount of this name, or correct the name";
        self.report(
            &ObjectReport { entry, kind },
            Code::UnknownServiceAccount,
            kind.account_field(),
            message,
            remedy,
        );
    }
}
