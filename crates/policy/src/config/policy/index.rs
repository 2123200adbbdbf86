//! Index of many rules by what a request needs to match them: a path, a principal, an address or a claim.
//!
//! Each rule is listed under one kind of these, that with the fewest other rules under the same values. A lookup finds a
//! superset of the rules that match. Rules that need nothing of the kind, such as those with regular expressions alone,
//! are always among them.

use std::{collections::HashMap, net::IpAddr};

use skysail_http::map::Map;

use super::{Permission, Principal, Rule};
use crate::config::{
    listener::Cidr,
    text::{MetadataMatch, TextMatch, ValueMatch},
};

/// Number of rules from which an index is smaller work than all rules.
const MIN_RULES: usize = 8;
/// Maximum number of lengths of prefixes, each of which costs a lookup. Rules with further lengths are always examined.
const MAX_LENGTHS: usize = 32;

/// Positions of rules, ascending.
type Positions = Vec<u32>;
/// Rules by an exact text.
type Texts = Map<Box<[u8]>, Positions>;

/// The index.
#[derive(Debug, Default)]
pub struct RuleIndex {
    /// Rules that are not listed elsewhere.
    others: Positions,
    paths: Texts,
    /// Rules by the beginning of the path, for each length.
    prefixes: Vec<(usize, Texts)>,
    principals: Texts,
    direct: Blocks,
    remote: Blocks,
    /// Rules by the text at a path of dynamic metadata, for each path.
    claims: Vec<(Box<[Box<str>]>, Texts)>,
}

/// Rules by blocks of addresses, for each family and prefix length.
#[derive(Debug, Default)]
struct Blocks(Vec<((bool, u8), Map<u128, Positions>)>);

/// RuleAttributes of a request or connection.
#[derive(Debug)]
pub struct RuleAttributes<'a> {
    /// Path without query; `None` for a connection.
    pub path: Option<&'a [u8]>,
    /// Names in the peer's certificate.
    pub names: Option<&'a skysail_identity::Peer>,
    /// Address of the peer.
    pub direct: IpAddr,
    /// Address of the client.
    pub remote: IpAddr,
}

/// A value that a request must have. A request that has none of a rule's values does not match the rule.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
enum Need {
    Path(Box<[u8]>),
    Prefix(Box<[u8]>),
    Principal(Box<[u8]>),
    Direct(Cidr),
    Remote(Cidr),
    Claim(Box<[Box<str>]>, Box<[u8]>),
}

/// Kind of a value. The alternatives of a rule must be of one kind.
#[derive(Clone, Debug, PartialEq, Eq)]
enum NeedKind {
    Path,
    Principal,
    Direct,
    Remote,
    Claim(Box<[Box<str>]>),
}

/// For each kind, the values of which a request must have one.
type Needs = Vec<(NeedKind, Vec<Need>)>;

impl RuleIndex {
    /// Makes an index; `None` if it would not reduce the work.
    pub(super) fn new(rules: &[Rule]) -> Option<Self> {
        if rules.len() < MIN_RULES {
            return None;
        }
        let needs: Vec<Needs> = rules.iter().map(of_rule).collect();
        let mut uses: HashMap<&Need, usize> = HashMap::new();
        for need in needs.iter().flatten().flat_map(|(_, needs)| needs) {
            *uses.entry(need).or_default() += 1;
        }
        let mut index = Self::default();
        for (position, needs) in (0..).zip(&needs) {
            let weight = |needs: &[Need]| needs.iter().map(|need| uses[need]).sum::<usize>();
            let best =
                needs.iter().map(|(_, needs)| (weight(needs), needs)).min_by_key(|(weight, _)| *weight);
            match best {
                Some((weight, needs)) if weight <= rules.len() / 2 => {
                    needs.iter().for_each(|need| index.add(need, position));
                }
                _ => index.others.push(position),
            }
        }
        (index.others.len() <= rules.len() / 2).then_some(index)
    }

    fn add(&mut self, need: &Need, position: u32) {
        let positions = match need {
            Need::Path(path) => self.paths.entry(path.clone()).or_default(),
            Need::Principal(name) => self.principals.entry(name.clone()).or_default(),
            Need::Direct(block) => self.direct.positions(block),
            Need::Remote(block) => self.remote.positions(block),
            Need::Prefix(prefix)
                if self.prefixes.len() >= MAX_LENGTHS
                    && self.prefixes.iter().all(|(length, _)| *length != prefix.len()) =>
            {
                &mut self.others
            }
            Need::Prefix(prefix) => {
                let of_length = found_or_added(&mut self.prefixes, &prefix.len());
                of_length.entry(prefix.clone()).or_default()
            }
            Need::Claim(path, text) => {
                found_or_added(&mut self.claims, path).entry(text.clone()).or_default()
            }
        };
        if positions.last() != Some(&position) {
            positions.push(position);
        }
    }

    /// Calls `visit` with lists of positions. Each rule that the request matches is in one of them. `claim` returns the
    /// text at a path of dynamic metadata.
    pub fn visit<'a, 'c>(
        &'a self,
        of: &RuleAttributes<'_>,
        claim: impl Fn(&[Box<str>]) -> Option<&'c str>,
        mut visit: impl FnMut(&'a [u32]),
    ) {
        if let Some(path) = of.path {
            self.paths.get(path).into_iter().for_each(|found| visit(found));
            for (length, prefixes) in &self.prefixes {
                let found = path.get(..*length).and_then(|start| prefixes.get(start));
                found.into_iter().for_each(|found| visit(found));
            }
        }
        if let Some(names) = of.names.filter(|_| !self.principals.is_empty()) {
            for name in names.uris.iter().chain(&names.dns).chain([&names.subject]) {
                self.principals.get(name.as_bytes()).into_iter().for_each(|found| visit(found));
            }
        }
        self.direct.visit(of.direct, &mut visit);
        self.remote.visit(of.remote, &mut visit);
        for (path, texts) in &self.claims {
            let found = claim(path).and_then(|text| texts.get(text.as_bytes()));
            found.into_iter().for_each(|found| visit(found));
        }
        visit(&self.others);
    }
}

/// Returns the value of a key in a short list, which is added if it is absent.
fn found_or_added<'m, K: Clone + PartialEq, V: Default>(list: &'m mut Vec<(K, V)>, key: &K) -> &'m mut V {
    let at = list.iter().position(|(other, _)| other == key).unwrap_or_else(|| {
        list.push((key.clone(), V::default()));
        list.len() - 1
    });
    &mut list[at].1
}

impl Blocks {
    fn positions(&mut self, block: &Cidr) -> &mut Positions {
        let of_length = found_or_added(&mut self.0, &(block.address.is_ipv4(), block.prefix_len));
        of_length.entry(network(block.address, block.prefix_len)).or_default()
    }

    /// Visits the blocks that contain an address, as [`Cidr::contains`] decides.
    fn visit<'a>(&'a self, address: IpAddr, visit: &mut impl FnMut(&'a [u32])) {
        let address = address.to_canonical();
        for ((is_ipv4, length), blocks) in &self.0 {
            if address.is_ipv4() == *is_ipv4
                && let Some(found) = blocks.get(&network(address, *length))
            {
                visit(found);
            }
        }
    }
}

/// Returns the bits of an address before its host part.
fn network(address: IpAddr, prefix_len: u8) -> u128 {
    let (bits, length) = match address {
        IpAddr::V4(address) => (u128::from(address.to_bits()), 32),
        IpAddr::V6(address) => (address.to_bits(), 128),
    };
    bits.checked_shr(length - u32::from(prefix_len).min(length)).unwrap_or(0)
}

fn of_rule(rule: &Rule) -> Needs {
    all([
        one_of(rule.permissions.iter().map(of_permission)),
        one_of(rule.principals.iter().map(of_principal)),
    ])
}

fn of_permission(permission: &Permission) -> Needs {
    match permission {
        Permission::Path(test) => of_path(test),
        Permission::Metadata(test) => of_claim(test),
        Permission::All(list) => all(list.iter().map(of_permission)),
        Permission::OneOf(list) => one_of(list.iter().map(of_permission)),
        _ => Needs::new(),
    }
}

fn of_principal(principal: &Principal) -> Needs {
    let one = |kind, need| vec![(kind, vec![need])];
    match principal {
        Principal::Authenticated(Some(TextMatch::Exact(name))) => {
            one(NeedKind::Principal, Need::Principal(name.clone()))
        }
        Principal::DirectIp(block) => one(NeedKind::Direct, Need::Direct(*block)),
        Principal::RemoteIp(block) => one(NeedKind::Remote, Need::Remote(*block)),
        Principal::Path(test) => of_path(test),
        Principal::Metadata(test) => of_claim(test),
        Principal::All(list) => all(list.iter().map(of_principal)),
        Principal::OneOf(list) => one_of(list.iter().map(of_principal)),
        _ => Needs::new(),
    }
}

fn of_path(test: &TextMatch) -> Needs {
    match test {
        TextMatch::Exact(path) => vec![(NeedKind::Path, vec![Need::Path(path.clone())])],
        TextMatch::Prefix(prefix) => vec![(NeedKind::Path, vec![Need::Prefix(prefix.clone())])],
        _ => Needs::new(),
    }
}

fn of_claim(test: &MetadataMatch) -> Needs {
    match &test.test {
        ValueMatch::Text(TextMatch::Exact(text)) if !test.invert => {
            let path: Box<[Box<str>]> = test.path.as_slice().into();
            vec![(NeedKind::Claim(path.clone()), vec![Need::Claim(path, text.clone())])]
        }
        _ => Needs::new(),
    }
}

/// Returns the needs of several conditions that must all hold: of each kind, the shortest list.
fn all(conditions: impl IntoIterator<Item = Needs>) -> Needs {
    let mut needs = Needs::new();
    for (kind, values) in conditions.into_iter().flatten() {
        match needs.iter_mut().find(|(other, _)| *other == kind) {
            Some((_, known)) if known.len() > values.len() => *known = values,
            Some(_) => {}
            None => needs.push((kind, values)),
        }
    }
    needs
}

/// Returns the needs of several conditions of which one must hold: the kinds that all of them have.
fn one_of(conditions: impl IntoIterator<Item = Needs>) -> Needs {
    let mut conditions = conditions.into_iter();
    let Some(mut needs) = conditions.next() else { return Needs::new() };
    for other in conditions {
        needs.retain_mut(|(kind, values)| {
            let more = other.iter().find(|(other, _)| other == kind);
            more.is_some_and(|(_, more)| {
                values.extend(more.iter().cloned());
                true
            })
        });
    }
    needs
}
