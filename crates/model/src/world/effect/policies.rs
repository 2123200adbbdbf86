//! Comparison of policies before and after a change, workload by workload.

use std::{
    cell::OnceCell,
    collections::{BTreeMap, BTreeSet, HashMap},
    ops::Range,
};

use super::list;
use crate::{
    api::{
        AuthorizationPolicy, Labels, MtlsMode, Object, Typed,
        security::{Action, Rule},
        selects,
    },
    clause::covers,
    world::{World, policy::is_wide},
};

/// Workloads with a sidecar, which enforces the policies.
#[derive(Debug)]
pub(super) struct Workloads<'a> {
    all: Vec<PodGroup<'a>>,
    /// Range of indexes of each namespace.
    namespaces: BTreeMap<&'a str, Range<usize>>,
    /// Indexes by label.
    labels: HashMap<(&'a str, &'a str), Vec<usize>>,
}

/// Pods of a workload that have equal labels.
#[derive(Debug)]
struct PodGroup<'a> {
    namespace: &'a str,
    name: &'a str,
    labels: &'a Labels,
    /// Modes of mutual TLS before and after.
    modes: OnceCell<[Modes; 2]>,
    /// Whether an ALLOW policy applies before and after.
    is_allowed: OnceCell<[bool; 2]>,
}

/// Modes of mutual TLS of a workload.
#[derive(Debug)]
struct Modes {
    /// Mode of the ports that no policy names.
    others: MtlsMode,
    ports: BTreeMap<u16, MtlsMode>,
}

impl Modes {
    fn is_strict(&self, port: u16) -> bool {
        *self.ports.get(&port).unwrap_or(&self.others) == MtlsMode::Strict
    }
}

/// Statements and the workloads for which they hold.
#[derive(Default)]
struct Statements<'a>(Vec<(String, String, Vec<&'a PodGroup<'a>>)>);

impl<'a> Statements<'a> {
    fn add(&mut self, text: String, end: &str, workload: &'a PodGroup<'a>) {
        match self.0.iter_mut().find(|(known, known_end, _)| *known == text && known_end == end) {
            Some((.., workloads)) => workloads.push(workload),
            None => self.0.push((text, end.to_owned(), vec![workload])),
        }
    }

    fn done(self) -> Vec<String> {
        let lines = self.0.into_iter().map(|(text, end, workloads)| {
            let mut names: Vec<String> = workloads.iter().map(|workload| workload.text()).collect();
            names.dedup();
            format!("{text} {}{end}", list(names))
        });
        lines.collect()
    }
}

impl PodGroup<'_> {
    fn text(&self) -> String {
        format!("{}/{}", self.namespace, self.name)
    }

    fn modes(&self, worlds: [&World; 2]) -> &[Modes; 2] {
        self.modes.get_or_init(|| {
            worlds.map(|world| {
                let (others, ports) = world.peer_modes(self.namespace, self.labels);
                Modes { others, ports: ports.into_iter().collect() }
            })
        })
    }

    fn is_allowed(&self, worlds: [&World; 2]) -> [bool; 2] {
        *self
            .is_allowed
            .get_or_init(|| worlds.map(|world| world.has_allow_policy(self.namespace, self.labels)))
    }
}

impl<'a> Workloads<'a> {
    pub(super) fn new(world: &'a World) -> Self {
        let pods = world.pods().filter(|pod| pod.has_sidecar() && !pod.spec.ended);
        let mut keys: Vec<(&str, &str, &Labels)> =
            pods.map(|pod| (&*pod.meta.namespace, &*pod.spec.workload.name, &*pod.meta.labels)).collect();
        keys.sort_unstable();
        keys.dedup();
        let mut all = Vec::with_capacity(keys.len());
        let mut namespaces: BTreeMap<&str, Range<usize>> = BTreeMap::new();
        let mut by_label: HashMap<(&str, &str), Vec<usize>> = HashMap::new();
        for (index, (namespace, name, labels)) in keys.into_iter().enumerate() {
            namespaces.entry(namespace).or_insert(index..index).end = index + 1;
            for (key, value) in labels {
                by_label.entry((key, value)).or_default().push(index);
            }
            let (modes, is_allowed) = (OnceCell::new(), OnceCell::new());
            all.push(PodGroup { namespace, name, labels, modes, is_allowed });
        }
        Self { all, namespaces, labels: by_label }
    }

    /// Returns what a changed policy newly accepts and denies.
    pub(super) fn compare(
        &self,
        before: &World,
        after: &World,
        old: Option<&Object>,
        new: Option<&Object>,
    ) -> Vec<String> {
        let worlds = [before, after];
        match old.or(new) {
            Some(Object::PeerAuthentication(_)) => {
                let selected = self.selected([(before, old), (after, new)]);
                mutual_tls(selected.keys().filter_map(|index| self.all.get(*index)), worlds)
            }
            Some(Object::AuthorizationPolicy(_)) => {
                let selected = self.selected([(before, old), (after, new)]);
                let workloads = selected.iter().filter_map(|(index, by)| Some((self.all.get(*index)?, *by)));
                authorization(workloads, worlds, [old, new])
            }
            // Another root namespace means other policies for the whole mesh.
            Some(Object::ConfigMap(_)) if before.mesh().root_namespace != after.mesh().root_namespace => {
                mutual_tls(self.all.iter(), worlds)
            }
            _ => Vec::new(),
        }
    }

    /// Returns the workloads that a policy selects before or after the change.
    fn selected(&self, policies: [(&World, Option<&Object>); 2]) -> BTreeMap<usize, [bool; 2]> {
        let mut selected: BTreeMap<usize, [bool; 2]> = BTreeMap::new();
        for (side, (world, policy)) in policies.into_iter().enumerate() {
            for index in policy.into_iter().flat_map(|policy| self.selected_by(world, policy)) {
                selected.entry(index).or_default()[side] = true;
            }
        }
        selected
    }

    fn selected_by(&self, world: &World, policy: &Object) -> Vec<usize> {
        let namespace = policy.meta().namespace.as_str();
        let is_root = world.mesh().root_namespace == namespace;
        let selector = match policy {
            Object::PeerAuthentication(policy) if is_root && !is_wide(policy.spec.selector.as_ref()) => {
                return Vec::new();
            }
            Object::PeerAuthentication(policy) => &policy.spec.selector,
            Object::AuthorizationPolicy(policy) if is_enforced(policy) => &policy.spec.selector,
            _ => return Vec::new(),
        };
        let within = match is_root {
            true => 0..self.all.len(),
            false => self.namespaces.get(namespace).cloned().unwrap_or_default(),
        };
        let Some(labels) =
            selector.as_ref().map(|selector| &selector.match_labels).filter(|of| !of.is_empty())
        else {
            return within.collect();
        };
        let sets = labels.iter().map(|(key, value)| self.labels.get(&(&**key, &**value)));
        let rarest = sets.map(|set| set.map_or(&[][..], Vec::as_slice)).min_by_key(|set| set.len());
        let candidates = rarest.unwrap_or_default().iter().copied();
        let selects = |index: &usize| {
            within.contains(index) && self.all.get(*index).is_some_and(|of| selects(labels, of.labels))
        };
        candidates.filter(selects).collect()
    }
}

/// Returns whether a policy has an effect on sidecars.
fn is_enforced(policy: &Typed<AuthorizationPolicy>) -> bool {
    let spec = &policy.spec;
    let is_attached = spec.target_ref.is_some() || !spec.target_refs.is_empty();
    let decides = matches!(spec.action, Action::Allow | Action::Deny);
    decides && !is_attached && !policy.meta.is_dry_run()
}

/// Returns statements about connections that are newly accepted or refused.
fn mutual_tls<'w>(workloads: impl Iterator<Item = &'w PodGroup<'w>>, worlds: [&World; 2]) -> Vec<String> {
    let (mut opened, mut closed) = (Statements::default(), Statements::default());
    for workload in workloads {
        let [before, after] = workload.modes(worlds);
        if let Some(place) = changed_ports(before, after, false) {
            opened.add(format!("connections without mutual TLS are accepted now{place} by"), "", workload);
        }
        if let Some(place) = changed_ports(before, after, true) {
            closed.add(format!("connections without mutual TLS are refused now{place} by"), "", workload);
        }
    }
    opened.0.append(&mut closed.0);
    opened.done()
}

/// Returns the ports whose mode changed to strict, or from strict if `strict` is false. `None` if there are none.
fn changed_ports(before: &Modes, after: &Modes, strict: bool) -> Option<String> {
    let has = |modes: &Modes, port: u16| modes.is_strict(port) == strict;
    let of_others = |modes: &Modes| (modes.others == MtlsMode::Strict) == strict;
    let named: BTreeSet<u16> = before.ports.keys().chain(after.ports.keys()).copied().collect();
    let text = |ports: Vec<u16>| list(ports.iter().map(ToString::to_string).collect());
    if of_others(after) && !of_others(before) {
        let except: Vec<u16> = named.into_iter().filter(|port| !has(after, *port)).collect();
        return Some(match except.is_empty() {
            true => String::new(),
            false => format!(" on all ports but {}", text(except)),
        });
    }
    let changed: Vec<u16> =
        named.into_iter().filter(|port| has(after, *port) && !has(before, *port)).collect();
    let word = if changed.len() == 1 { "port" } else { "ports" };
    (!changed.is_empty()).then(|| format!(" on {word} {}", text(changed)))
}

/// Returns statements about requests that are newly accepted or denied by a policy.
fn authorization<'w>(
    workloads: impl Iterator<Item = (&'w PodGroup<'w>, [bool; 2])>,
    worlds: [&World; 2],
    policies: [Option<&Object>; 2],
) -> Vec<String> {
    let sides = policies.map(Side::of);
    let (mut opened, mut closed) = (Statements::default(), Statements::default());
    for (workload, selected) in workloads {
        let side = |of: usize| if selected[of] { sides[of] } else { Side::default() };
        let (before, after) = (side(0), side(1));
        let (before_name, after_name) = match selected {
            [true, true] => ("the former version of this policy", "the new version of this policy"),
            _ => ("this policy", "this policy"),
        };
        if adds(before.deny, after.deny) {
            let removed = removed(before.deny, after.deny);
            let end = format!(" unless a policy denies them{removed}");
            opened.add(format!("requests that {before_name} denied are accepted now by"), &end, workload);
        }
        if adds(after.deny, before.deny) {
            closed.add(format!("requests that {after_name} denies are denied now by"), "", workload);
        }
        match workload.is_allowed(worlds) {
            [true, false] if before.allow.is_some() => {
                let end = " unless a policy denies it: no ALLOW policy is left";
                opened.add("every request is accepted now by".to_owned(), end, workload);
            }
            [false, true] if after.allow.is_some() => {
                let text = "requests that no ALLOW policy allows are denied now by";
                closed.add(text.to_owned(), "", workload);
            }
            [true, true] => {
                let (before, after) = (before.allow.unwrap_or_default(), after.allow.unwrap_or_default());
                if adds(after, before) {
                    let text = format!("requests that {after_name} allows are accepted now by");
                    opened.add(text, " unless a policy denies them", workload);
                }
                if adds(before, after) {
                    let text = format!("requests that {before_name} allowed are denied now by");
                    closed.add(text, " unless a policy allows them", workload);
                }
            }
            _ => {}
        }
    }
    opened.0.append(&mut closed.0);
    opened.done()
}

/// A policy before or after the change, for the workloads that it selects.
#[derive(Clone, Copy, Default)]
struct Side<'a> {
    deny: &'a [Rule],
    allow: Option<&'a [Rule]>,
}

impl<'a> Side<'a> {
    fn of(policy: Option<&'a Object>) -> Self {
        let Some(Object::AuthorizationPolicy(policy)) = policy else { return Self::default() };
        let rules = &policy.spec.rules;
        match policy.spec.action {
            Action::Allow => Self { deny: &[], allow: Some(rules) },
            Action::Deny => Self { deny: rules, allow: None },
            // The authorizer decides.
            Action::Audit | Action::Custom => Self::default(),
        }
    }
}

/// Returns whether a rule may match a request that none of the others matches.
fn adds(rules: &[Rule], others: &[Rule]) -> bool {
    rules.iter().any(|rule| !others.iter().any(|other| covers(other, rule)))
}

/// Returns text for the number of removed rules, if nothing else was changed.
fn removed(before: &[Rule], after: &[Rule]) -> String {
    let count = before.iter().filter(|rule| !after.contains(rule)).count();
    match after.is_empty() || after.iter().any(|rule| !before.contains(rule)) {
        true => String::new(),
        false if count == 1 => ": 1 rule was removed".to_owned(),
        false => format!(": {count} rules were removed"),
    }
}
