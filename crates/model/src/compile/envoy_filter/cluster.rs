//! Patches of clusters.

use std::{collections::BTreeSet, sync::Arc};

use prost_reflect::{DynamicMessage, Value};
use skysail_core::{ClusterName, names::Direction};
use skysail_proto::Codec as _;
use skysail_xds::{Kind, Resource, envoy::pb::google::protobuf::value::Kind as Json};

use super::{ApplicablePatch, Patches, Warnings, decode, encode};
use crate::{
    Role,
    api::envoy_filter::{ApplyTo, Context, PatchOperation},
    compile::pb,
    reflect,
};

/// Name of the cluster of inbound connections to ports without a service.
const INBOUND_PASSTHROUGH: &str = "InboundPassthroughCluster";

/// Patches the clusters among resources. Endpoints of removed clusters are removed too.
pub(super) fn patch_all(
    patches: &Patches<'_>,
    outbound: Context,
    made: Vec<Arc<Resource>>,
    warnings: &mut Warnings,
) -> Vec<Arc<Resource>> {
    if !patches.has(&[ApplyTo::Cluster]) {
        return made;
    }
    let mut removed = BTreeSet::new();
    let mut patched = Vec::with_capacity(made.len());
    for resource in made {
        if resource.kind != Kind::Cluster {
            patched.push(resource);
            continue;
        }
        let name = ClusterName::parse(&resource.name);
        let is_inbound = resource.name.as_ref() == INBOUND_PASSTHROUGH
            || name.as_ref().is_some_and(|name| name.direction == Direction::Inbound);
        let context = if is_inbound { Context::SidecarInbound } else { outbound };
        let matching: Vec<&ApplicablePatch<'_>> =
            patches.of(ApplyTo::Cluster, context).filter(|patch| takes(patch, &resource, name)).collect();
        if matching.is_empty() {
            patched.push(resource);
            continue;
        }
        match decode(&resource).and_then(|cluster| apply(cluster, &matching, warnings)) {
            Some(cluster) => patched.push(encode(Kind::Cluster, &cluster)),
            None => _ = removed.insert(Arc::clone(&resource.name)),
        }
    }
    patched.retain(|resource| resource.kind != Kind::Endpoint || !removed.contains(&resource.name));
    patched
}

/// Returns the clusters that patches add.
pub(super) fn added(patches: &Patches<'_>, role: Role) -> impl Iterator<Item = Arc<Resource>> {
    let contexts: &[Context] = match role {
        Role::Router => &[Context::Gateway],
        _ => &[Context::SidecarOutbound, Context::SidecarInbound],
    };
    let adding = patches.0.iter().filter(|patch| {
        patch.config.apply_to == ApplyTo::Cluster
            && patch.operation == PatchOperation::Add
            && contexts.iter().any(|context| patch.adds_in(*context))
    });
    adding.filter_map(|patch| Some(encode(Kind::Cluster, patch.value()?)))
}

/// Returns whether a cluster meets the condition of a patch.
fn takes(patch: &ApplicablePatch<'_>, resource: &Resource, name: Option<ClusterName<'_>>) -> bool {
    let Some(condition) = &patch.config.matched.cluster else { return true };
    if !condition.name.is_empty() {
        return *condition.name == *resource.name;
    }
    let none = ClusterName { direction: Direction::Outbound, port: 0, subset: "", host: "" };
    let name = name.unwrap_or(none);
    let is_of_service = || match name.direction {
        Direction::Inbound => services(resource).contains(&condition.service),
        Direction::Outbound => condition.service == name.host,
    };
    (condition.subset.is_empty() || condition.subset == name.subset)
        && (condition.service.is_empty() || is_of_service())
        && (condition.port_number == 0 || condition.port_number == u32::from(name.port))
}

/// Returns the hosts of the services to which an inbound cluster belongs. Its metadata name them.
fn services(resource: &Resource) -> Vec<String> {
    let Ok(cluster) = pb::cluster::Cluster::from_slice(&resource.body) else { return Vec::new() };
    let described = cluster.metadata.and_then(|mut metadata| metadata.filter_metadata.remove("istio"));
    let listed = described.and_then(|mut described| described.fields.remove("services")?.kind);
    let Some(Json::ListValue(list)) = listed else { return Vec::new() };
    let hosts = list.values.into_iter().map(|service| match service.kind {
        Some(Json::StructValue(mut service)) => match service.fields.remove("host")?.kind {
            Some(Json::StringValue(host)) => Some(host),
            _ => None,
        },
        _ => None,
    });
    hosts.flatten().collect()
}

/// Applies patches; `None` if one removes the cluster.
fn apply(
    mut cluster: DynamicMessage,
    patches: &[&ApplicablePatch<'_>],
    warnings: &mut Warnings,
) -> Option<DynamicMessage> {
    for patch in patches {
        if patch.operation == PatchOperation::Remove {
            return None;
        }
        let (Some(lists), Some(value)) = (patch.merges(), patch.value()) else { continue };
        match reflect::child(value, "transport_socket") {
            Some(socket) => merge_socket(&mut cluster, socket, patch, warnings),
            None => reflect::merge(&mut cluster, value, lists),
        }
    }
    Some(cluster)
}

/// Merges a transport socket into that of the same name. As in Istio, the rest of the patch has no effect then, and a
/// cluster with several sockets keeps them if none has the name.
fn merge_socket(
    cluster: &mut DynamicMessage,
    socket: &DynamicMessage,
    patch: &ApplicablePatch<'_>,
    warnings: &mut Warnings,
) {
    let mut merge = |to: &mut DynamicMessage| {
        let configs = (reflect::child_mut(to, "typed_config"), reflect::child(socket, "typed_config"));
        if let (Some(to), Some(from)) = configs
            && let Err(reason) = reflect::merge_any(to, from)
        {
            warnings.add(patch, format!("the patch is not applied: {reason}"));
        }
    };
    let name = reflect::text(socket, "name");
    let is_same = |one: &DynamicMessage| reflect::text(one, "name") == name;
    let mut matches = reflect::take_list(cluster, "transport_socket_matches");
    if !matches.is_empty() {
        let sockets = matches.iter_mut().filter_map(|one| reflect::child_mut(one, "transport_socket"));
        if let Some(to) = sockets.into_iter().find(|socket| is_same(socket)) {
            merge(to);
        }
        return reflect::set_list(cluster, "transport_socket_matches", matches);
    }
    match reflect::child_mut(cluster, "transport_socket").filter(|to| is_same(to)) {
        Some(to) => merge(to),
        None => _ = cluster.try_set_field_by_name("transport_socket", Value::Message(socket.clone())),
    }
}
