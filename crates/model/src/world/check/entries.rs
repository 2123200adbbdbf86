//! ServiceEntries: hosts that several have.

use super::{About, Report};
use crate::{
    api::{Kind, service_entry::host_of},
    diagnostic::Severity,
};

impl Report<'_> {
    pub(super) fn service_entries(&mut self) {
        for entry in self.world.service_entries.iter() {
            let about = About { entry, kind: Kind::ServiceEntry };
            for (index, host) in entry.object.spec.hosts.iter().enumerate() {
                let Some(service) = self.world.service_named(about.namespace(), &host_of(host)) else {
                    continue;
                };
                let of = service.spec.outside.as_ref().map_or("", |outside| outside.entry.as_str());
                if of != entry.object.meta.name {
                    let message =
                        format!("{host} already stands in {of}, which is older; here it has no effect");
                    let remedy = "put endpoints and ports into one ServiceEntry";
                    self.say(&about, Severity::Error, format!("spec.hosts[{index}]"), message, remedy);
                }
            }
        }
    }
}
