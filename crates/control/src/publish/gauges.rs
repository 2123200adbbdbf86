//! Gauges of the metrics page.

use std::collections::BTreeMap;

use skysail_model::Severity;

use super::Publisher;
use crate::metrics::Gauges;

impl Publisher {
    /// Returns the gauges of the published state. The caller adds those of the authority and of DNS.
    pub(crate) fn gauges(&self) -> Gauges {
        let state = self.read();
        let count = |severity| state.logged_findings.iter().filter(|of| of.severity == severity).count();
        Gauges {
            clients: state.clients.len(),
            views: state.views.len(),
            scopes: state.scopes_in_use(),
            services: state.world.services().count(),
            config_errors: count(Severity::Error),
            config_warnings: count(Severity::Warning),
            dns_names: BTreeMap::new(),
            authority: None,
        }
    }
}
