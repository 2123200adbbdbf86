//! Refuses filter chains with equal criteria, as Envoy does: the choice between them would be ambiguous.

use std::collections::HashMap;

use super::{At as _, Reject, Result, fingerprint};
use skysail_policy::config::listener::ChainMatch;

/// Maximum number of combinations of criteria in a filter chain that is compared. Real filter chains have a few.
const MAX_COMBINATIONS: usize = 10_000;

/// Checks that no two filter chains have a combination of criteria in common, and that server names are valid.
pub(super) fn check<'a>(chains: impl Iterator<Item = &'a ChainMatch>) -> Result<()> {
    let mut seen = HashMap::new();
    for (index, chain) in chains.enumerate() {
        let at = |reject: Reject| {
            reject.at_field("filter_chain_match").at_field(format_args!("filter_chains[{index}]"))
        };
        server_names(chain).map_err(at)?;
        let mut twin = None;
        each_combination(chain, |combination| {
            let first = *seen.entry(combination).or_insert(index);
            if first != index {
                twin = Some(first);
            }
        });
        if let Some(twin) = twin {
            return Err(at(Reject::new(format!(
                "filter_chains[{twin}] has the same criteria: change or remove one of them"
            ))));
        }
    }
    Ok(())
}

/// Checks that a wildcard in a server name is the whole first label.
fn server_names(chain: &ChainMatch) -> Result<()> {
    for (index, name) in chain.server_names.iter().enumerate() {
        let rest = name.strip_prefix("*.").unwrap_or(name);
        if rest.contains('*') {
            return Err(Reject::new(format!("{name:?} has a wildcard that is not a whole first label")))
                .at(format_args!("server_names[{index}]"));
        }
    }
    Ok(())
}

/// Calls a function with the fingerprint of each combination of single criteria.
fn each_combination(chain: &ChainMatch, mut call: impl FnMut(u64)) {
    let (names, protocols) = (&chain.server_names, &chain.application_protocols);
    let lengths = [chain.destinations.len(), names.len(), protocols.len(), chain.sources.len()];
    let count = lengths.iter().fold(1_usize, |count, length| count.saturating_mul((*length).max(1)));
    if count > MAX_COMBINATIONS {
        return;
    }
    for number in 0..count {
        let mut rest = number;
        let [destination, name, protocol, source] = lengths.map(|length| {
            let index = rest % length.max(1);
            rest /= length.max(1);
            index
        });
        call(fingerprint((
            chain.destination_port,
            chain.destinations.get(destination),
            names.get(name),
            chain.transport,
            protocols.get(protocol),
            chain.sources.get(source),
        )));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(names: &[&str]) -> ChainMatch {
        ChainMatch {
            server_names: names.iter().map(|name| (*name).into()).collect(),
            ..ChainMatch::default()
        }
    }

    #[test]
    fn chains_with_a_common_combination_of_criteria_are_refused() {
        let with_port = ChainMatch { destination_port: Some(1), ..names(&["a"]) };
        let protocols =
            ChainMatch { application_protocols: vec!["h2".into(), "http/1.1".into()], ..names(&["a"]) };
        let fine = [names(&["a", "b"]), names(&["c"]), names(&[]), with_port, protocols];
        check(fine.iter()).unwrap();
        let twice = [names(&["a", "b"]), names(&["c", "b"])];
        let reason = check(twice.iter()).unwrap_err().to_string();
        assert!(reason.starts_with("filter_chains[1].filter_chain_match: filter_chains[0] has"), "{reason}");
        check([ChainMatch::default(), ChainMatch::default()].iter()).unwrap_err();
        // A name that is listed twice in one chain is harmless.
        check([names(&["a", "a"])].iter()).unwrap();
    }

    #[test]
    fn wildcards_are_whole_labels() {
        check([names(&["*.a"])].iter()).unwrap();
        for name in ["*", "a*.b", "*a", "a.*", "*.*.a"] {
            let reason = check([names(&[name])].iter()).unwrap_err().to_string();
            assert!(reason.contains("server_names[0]"), "{reason}");
        }
    }
}
