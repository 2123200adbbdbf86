//! DestinationRules of one host, of which the older takes precedence.

use std::collections::BTreeMap;

use super::super::{ObjectReport, Report};
use crate::{
    analysis::Code,
    api::{DestinationRule, Kind},
    world::{hosts::fqdn, store::Entry},
};

impl Report<'_> {
    /// Reports settings that an older rule of the same host, selector and `exportTo` has too.
    pub(super) fn destination_rule_conflicts(&mut self) {
        let mut rules: Vec<_> = self.world.destination_rules.iter().collect();
        rules.sort_by(|one, other| one.age().cmp(&other.age()));
        let mut by_host: BTreeMap<(&str, String), Vec<&Entry<DestinationRule>>> = BTreeMap::new();
        let mut found = Vec::new();
        for entry in rules {
            let (meta, spec) = (&entry.object.meta, &entry.object.spec);
            let older = by_host.entry((&meta.namespace, fqdn(&spec.host, &meta.namespace))).or_default();
            let same = |other: &&&Entry<DestinationRule>| {
                let of = &other.object.spec;
                of.workload_selector == spec.workload_selector && of.export_to == spec.export_to
            };
            for first in older.iter().filter(same).take(1) {
                let of = &first.object.spec;
                if of.traffic_policy.is_some() && spec.traffic_policy.is_some() {
                    found.push((
                        entry,
                        *first,
                        "spec.trafficPolicy".to_owned(),
                        "has a trafficPolicy".to_owned(),
                    ));
                }
                for (index, subset) in spec.subsets.iter().enumerate() {
                    if of.subsets.iter().any(|known| known.name == subset.name) {
                        let what = format!("has subset {}", subset.name);
                        found.push((entry, *first, format!("spec.subsets[{index}].name"), what));
                    }
                }
            }
            // Rules are compared with the oldest one, so that the time is bounded.
            if older.is_empty() || !older.iter().any(|other| same(&other)) {
                older.push(entry);
            }
        }
        for (entry, first, field, what) in found {
            let about = ObjectReport { entry, kind: Kind::DestinationRule };
            let first = ObjectReport { entry: first, kind: Kind::DestinationRule }.name();
            let message = format!("has no effect: {first} is older and {what} for the same host");
            self.report(&about, Code::DestinationRuleConflict, field, message, "merge the rules into one");
        }
    }
}
