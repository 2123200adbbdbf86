//! Validation of `localityLbSetting` and `zoneAwareLbSetting`, of DestinationRules and of the mesh.

use super::{Code, Findings};
use crate::api::{
    MeshConfig,
    destination_rule::{Failover, LoadBalancer, LocalityLb, ZoneAwareLb},
    locality::{REGION, SUBZONE, ZONE},
};

/// Labels of localities.
const LABELS: [&str; 3] = [REGION, ZONE, SUBZONE];

/// Checks the settings of a DestinationRule. `ejects` is whether the rule has outlier detection.
pub(super) fn of_rule(balancer: &LoadBalancer, ejects: bool, field: &str, findings: &mut Findings) {
    if let Some(zones) = &balancer.zone_aware_lb_setting {
        if balancer.locality_lb_setting.is_some() {
            let message = "zoneAwareLbSetting and localityLbSetting exclude each other";
            findings.add(Code::ExclusiveFields, field, message, "remove one of them");
        }
        zone_aware(zones, &format!("{field}.zoneAwareLbSetting"), findings);
    }
    if let Some(locality) = &balancer.locality_lb_setting {
        let field = format!("{field}.localityLbSetting");
        nearest(locality, &field, findings);
        let fails_over = !locality.failover.is_empty() || !locality.failover_priority.is_empty();
        if fails_over && !ejects && locality.enabled != Some(false) {
            let message = "has no failover without outlierDetection, which finds the endpoints that fail";
            findings.add(Code::NoEffect, field, message, "set outlierDetection");
        }
    }
}

/// Checks the settings of the mesh. They do not exclude each other: `zoneAwareLbSetting` has precedence.
pub(super) fn of_mesh(mesh: &MeshConfig, findings: &mut Findings) {
    if let Some(zones) = &mesh.zone_aware_lb_setting {
        zone_aware(zones, "zoneAwareLbSetting", findings);
    }
    if let Some(locality) = &mesh.locality_lb_setting {
        nearest(locality, "localityLbSetting", findings);
    }
}

fn nearest(locality: &LocalityLb, field: &str, findings: &mut Findings) {
    if !locality.distribute.is_empty() && !locality.failover.is_empty() {
        let message = "distribute and failover exclude each other";
        findings.add(Code::ExclusiveFields, field, message, "remove one of them");
    }
    if !locality.failover.is_empty() {
        no_places(&locality.failover_priority, field, "failover orders them", findings);
    }
    for (index, distribute) in locality.distribute.iter().enumerate() {
        if distribute.to.values().sum::<u32>() != 100 {
            let (field, message) =
                (format!("{field}.distribute[{index}].to"), "the weights do not add up to 100");
            findings.add(Code::LocalityWeights, field, message, "change the weights");
        }
    }
    regions(&locality.failover, field, findings);
}

fn zone_aware(zones: &ZoneAwareLb, field: &str, findings: &mut Findings) {
    no_places(&zones.failover_priority, field, "zoneAwareLbSetting balances them itself", findings);
    regions(&zones.failover, field, findings);
}

/// Refuses labels of localities, as Istio does.
fn no_places(labels: &[String], field: &str, reason: &str, findings: &mut Findings) {
    for (index, label) in labels.iter().enumerate().filter(|(_, label)| LABELS.contains(&label.as_str())) {
        let message = format!("must not name {label}: {reason}");
        let field = format!("{field}.failoverPriority[{index}]");
        findings.add(Code::ExclusiveFields, field, message, "remove the label");
    }
}

fn regions(failover: &[Failover], field: &str, findings: &mut Findings) {
    for (index, Failover { from, to }) in failover.iter().enumerate() {
        let field = format!("{field}.failover[{index}]");
        if from == to {
            let message = format!("leads from region {from:?} to itself");
            findings.add(Code::InvalidValue, field, message, "name two regions");
        } else if let Some(text) = [from, to].into_iter().find(|text| text.contains(['/', '*'])) {
            let message = format!("{text:?} is not a region");
            findings.add(Code::InvalidValue, field, message, "write a region alone, without zone and *");
        }
    }
}
