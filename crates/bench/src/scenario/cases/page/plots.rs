//! Plots of a group of figures: bars of cases below the network, phase or variant that they share, with one bar for each
//! peer, and published figures below them.

use crate::{
    peers::Peer,
    plot::{self, Bar, BarAxis},
    report::Spread,
    scenario::{
        cases::{CaseStudy, PublishedCase, result::CaseSummary},
        figures::{self, PUBLISHED_BARS, Plot, RANGE_OF_BARS},
        format::Figure,
    },
};

/// Name of a case without sidecars, and its part in the names of others.
const NO_SIDECARS: &str = "none";
/// Maximum number of parts of a bar that are shades of its peer's colour. More parts have colours of their own.
const MAX_SHADES: usize = 3;
/// Part of the names of figures of Envoys.
const ENVOYS: &str = "_envoys_";

/// Returns the plots of a group in a section; `None` without values.
pub(super) fn of_group<S: CaseStudy>(
    group: S::Group,
    (section, rows): (&str, &[&CaseSummary]),
    published: &[PublishedCase],
) -> Option<Plot> {
    let of_panels = panels::<S>(group);
    let panels: Vec<String> = of_panels
        .iter()
        .map(|parts| panel(parts, (section, rows), published))
        .filter(|panel| !panel.is_empty())
        .collect();
    if panels.is_empty() {
        return None;
    }
    let mut entries = Vec::new();
    let mut has_published = false;
    for parts in &of_panels {
        entries.extend(key(parts, rows));
        has_published |=
            parts.iter().any(|part| published.iter().any(|of| of.metrics.contains_key(part.metric)));
    }
    let mut explanation = RANGE_OF_BARS.to_owned();
    if of_panels.iter().any(|parts| parts.len() > 1) {
        explanation.push_str(
            " A bar of several parts has the sums of their medians, of their minima and of their maxima.",
        );
    }
    if has_published {
        entries.push((figures::published_colour(0), "published, not measured here".to_owned()));
        explanation.push(' ');
        explanation.push_str(PUBLISHED_BARS);
    }
    Some(Plot { panels, legend: plot::legend(&entries), explanation })
}

/// Returns the title of a group with the unit, if all its plots have the same.
pub(super) fn group_title<S: CaseStudy>(group: S::Group) -> String {
    let title = S::group_title(group);
    let panels = panels::<S>(group);
    let mut all = panels.iter().flatten();
    let Some(first) = all.next() else { return title.to_owned() };
    let is_same = all.all(|figure| figures::unit(figure) == figures::unit(first));
    // A title may have its unit already.
    if is_same && !title.contains(", ") && !title.contains(" per ") {
        return figures::with_unit(title, first);
    }
    title.to_owned()
}

/// Returns the figures of each plot of a group. A percentile has a plot of its own.
fn panels<S: CaseStudy>(group: S::Group) -> Vec<Vec<&'static Figure>> {
    let all = S::figures(group);
    if figures::are_percentiles(all) {
        return all.iter().map(|figure| vec![figure]).collect();
    }
    let plots = S::plots(group);
    if S::are_parts(group) { plots } else { plots.into_iter().flatten().map(|figure| vec![figure]).collect() }
}

/// Returns the peer whose cost a figure of a case is; `None` without sidecars. A case without a peer in its name is one
/// of Skysail.
pub(super) fn peer_of(case: &str, figure: &Figure) -> Option<Peer> {
    if case.split('/').any(|part| part == NO_SIDECARS) {
        return None;
    }
    let is_part = |peer: &&Peer| case.split('/').any(|part| part == peer.name());
    let peers = [&Peer::ALL[..], &[Peer::Relay]].concat();
    let usual = if figure.metric.contains(ENVOYS) { Peer::Envoy } else { Peer::Skysail };
    Some(peers.iter().find(is_part).copied().unwrap_or(usual))
}

/// Returns the parts of a case's name that are not its peer, its section or the number of connections in that: a network, a
/// phase, or a variant.
pub(super) fn heading_of(case: &str, section: &str) -> String {
    let (mut rest, _) = split(case);
    rest.retain(|part| *part != section && section.split(' ').next() != Some(*part));
    rest.join(", ")
}

/// Splits the name of a case with several parts into the parts without the peer, and the peer.
fn split(case: &str) -> (Vec<&str>, Option<&str>) {
    let is_peer = |part: &&str| {
        *part == NO_SIDECARS
            || *part == Peer::Relay.name()
            || Peer::ALL.iter().any(|peer| peer.name() == *part)
    };
    let (peers, rest): (Vec<&str>, Vec<&str>) = case.split('/').partition(is_peer);
    (rest, peers.first().copied())
}

/// Returns the label of a published system: its sidecars and its rate, because they may differ from those measured here,
/// and its number in the list of sources.
pub(super) fn published_label(of: &PublishedCase, index: usize) -> String {
    let sidecars = of.sidecars.map(|number| format!(", {} sidecars", plot::tick_label(f64::from(number))));
    let rate = of.rate.map(|rate| format!(", {} requests/s", plot::tick_label(rate)));
    let setting: String = [sidecars, rate].into_iter().flatten().collect();
    format!("{}{setting} [{}]", of.system, index + 1)
}

/// Returns the CSS class of a part of a bar.
fn class(colour: &str, index: usize, number: usize) -> String {
    match index {
        _ if number > MAX_SHADES => format!("step{}", index % 8),
        0 => colour.to_owned(),
        _ => format!("{colour} part{index}"),
    }
}

/// Plots bars of which the figures are the parts; empty without values.
fn panel(
    parts: &[&'static Figure],
    (section, rows): (&str, &[&CaseSummary]),
    published: &[PublishedCase],
) -> String {
    let Some(first) = parts.first() else { return String::new() };
    let mut groups: Vec<(String, Vec<Bar>)> = Vec::new();
    for row in rows {
        let Some(bar) = bar(row, parts) else { continue };
        let heading = heading_of(&row.case, section);
        // Without a peer, the heading is the whole name of the case.
        let (heading, label) = match split(&row.case).1 {
            Some(peer) => {
                (heading, if peer == NO_SIDECARS { "no sidecar".to_owned() } else { peer.to_owned() })
            }
            None => (String::new(), row.case.clone()),
        };
        let bar = Bar { label, ..bar };
        match groups.iter_mut().find(|(of, _)| *of == heading) {
            Some((_, bars)) => bars.push(bar),
            None => groups.push((heading, vec![bar])),
        }
    }
    if groups.is_empty() {
        return String::new();
    }
    for (index, of) in published.iter().enumerate() {
        let is_published = |part: &&&Figure| of.metrics.contains_key(part.metric);
        let of_them: Vec<&Figure> = parts.iter().filter(is_published).copied().collect();
        let value: f64 =
            of_them.iter().filter_map(|part| Some(of.metrics.get(part.metric)? / part.unit)).sum();
        let words = of_them.iter().map(|part| figures::measured(part)).collect::<Vec<_>>().join(" + ");
        let heading = match of_them.len() {
            0 => continue,
            number if number == parts.len() => "published, not measured here".to_owned(),
            _ => format!("published: {words}"),
        };
        let bar = Bar {
            label: published_label(of, index),
            parts: vec![(value, figures::published_colour(index))],
            range: (value, value),
        };
        match groups.iter_mut().find(|(of, _)| *of == heading) {
            Some((_, bars)) => bars.push(bar),
            None => groups.push((heading, vec![bar])),
        }
    }
    let words = match parts {
        [one] => figures::measured(one).to_owned(),
        _ => parts.iter().map(|part| figures::measured(part)).collect::<Vec<_>>().join(" + "),
    };
    let digits = parts.iter().map(|figure| figure.digits).max().unwrap_or_default();
    let axis = match parts {
        [one] => figures::title(one),
        _ => figures::with_unit("sum of the parts", first),
    };
    plot::bars(&groups, BarAxis { plot: shortened(&words), title: axis, digits })
}

/// Returns a title of a plot that fits its width.
fn shortened(words: &str) -> String {
    const MAX: usize = 56;
    if words.chars().count() <= MAX { words.to_owned() } else { "Sum of the parts".to_owned() }
}

/// Returns the bar of a case; `None` without values. Its range is that of the sum of the minima and of the maxima.
fn bar(row: &CaseSummary, parts: &[&'static Figure]) -> Option<Bar> {
    let colour = figures::colour(peer_of(&row.case, parts.first()?));
    let value = |(index, figure): (usize, &&Figure)| {
        let spread = row.metrics.get(figure.metric)?.divided_by(figure.unit);
        Some((class(&colour, index, parts.len()), spread))
    };
    let values: Vec<(String, Spread)> = parts.iter().enumerate().filter_map(value).collect();
    let sum = |of: fn(&Spread) -> f64| values.iter().map(|(_, spread)| of(spread)).sum();
    (!values.is_empty()).then(|| Bar {
        label: String::new(),
        range: (sum(|spread| spread.min), sum(|spread| spread.max)),
        parts: values.iter().map(|(class, spread)| (spread.median, class.clone())).collect(),
    })
}

/// Returns the colours of peers and of parts with their meanings.
fn key(parts: &[&'static Figure], rows: &[&CaseSummary]) -> Vec<(String, String)> {
    let mut entries: Vec<(String, String)> = Vec::new();
    let has_shades = parts.len() <= MAX_SHADES;
    if let Some(first) = parts.first().filter(|_| has_shades) {
        let rows = rows.iter().filter(|row| parts.iter().any(|part| row.metrics.contains_key(part.metric)));
        entries.extend(rows.map(|row| {
            let peer = peer_of(&row.case, first);
            (figures::colour(peer), peer.map_or("no sidecar", Peer::name).to_owned())
        }));
    }
    if parts.len() > 1 {
        let shade = |index: usize| match index {
            0 => "full colour: ",
            1 => "paler: ",
            _ => "palest: ",
        };
        entries.extend(parts.iter().enumerate().map(|(index, part)| {
            let place = if has_shades { shade(index) } else { "" };
            (class("none", index, parts.len()), format!("{place}{}", figures::measured(part)))
        }));
    }
    entries
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::scenario::format::figure;

    const CPU: Figure = figure("cpu_sidecars_us_per_request", "sidecars CPU µs", 1.0, 0);

    #[test]
    fn colours_are_those_of_the_peer_of_a_case() {
        let colour = |case: &str| figures::colour(peer_of(case, &CPU));
        assert_eq!(colour("tree/skysail"), colour("bridge/skysail/16"));
        assert_eq!(colour("churn-25"), colour("full/skysail"), "a control plane is Skysail's");
        let all =
            ["tree/none", "tree/skysail", "tree/envoy/before", "a/haproxy", "a/nginx", "a/relay"].map(colour);
        assert_eq!(all, ["none", "peer0", "peer1", "peer2", "peer3", "peer4"]);
        let queries = figure("queries_envoys_per_second", "Envoys queries/s", 1.0, 0);
        assert_eq!(figures::colour(peer_of("sidecars-100-hosts-30", &queries)), "peer1");
    }

    #[test]
    fn headings_are_what_bars_of_peers_have_in_common() {
        assert_eq!(heading_of("bridge/skysail/16", "16 connections"), "bridge");
        assert_eq!(heading_of("three-tiers/envoy/server-dies", "three-tiers"), "server-dies");
        assert_eq!(heading_of("full/envoy", "PostgreSQL"), "full");
        assert_eq!(heading_of("tree/none", "tree"), "");
    }

    #[test]
    fn up_to_three_parts_are_shades_of_the_colour_of_the_peer() {
        assert_eq!([0, 1, 2].map(|index| class("peer1", index, 3)), ["peer1", "peer1 part1", "peer1 part2"]);
        assert_eq!([0, 7].map(|index| class("peer1", index, 8)), ["step0", "step7"]);
    }
}
