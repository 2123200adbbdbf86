//! Checks of workloads: missing service accounts.

use super::{ObjectReport, Report};
use crate::{analysis::Code, api::Template};

/// Service account that Kubernetes creates in every namespace.
const DEFAULT_ACCOUNT: &str = "default";

impl Report<'_> {
    /// Reports service accounts that do not exist; a cluster starts no pod with one.
    pub(super) fn template(&mut self, about: &ObjectReport<'_, Template>) {
        let account = &about.entry.object.spec.service_account;
        if account == DEFAULT_ACCOUNT || self.world.has_service_account(about.namespace(), account) {
            return;
        }
        let message = format!(
            "there is no ServiceAccount {account:?} in namespace {}, and a cluster starts no pod without it",
            about.namespace()
        );
        let remedy = "add a ServiceAccount of this name, or correct the name";
        self.report(about, Code::UnknownServiceAccount, about.kind.account_field(), message, remedy);
    }
}
