use std::{collections::BTreeMap, fs, path::Path};

use super::write;
use crate::{
    access_log::AccessLog,
    peers::Peer,
    scenario::{
        ScenarioResult,
        format::{Published, PublishedRow},
        tests::result,
    },
    topology::Topology,
    variant::Variant,
};

/// Results of the repository.
const RESULTS: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../benchmarks/results");
/// Seconds of a day.
const DAY: u64 = 86_400;

/// Returns a result of a commit, with published figures, some days after 2026-11-25.
fn of_commit(commit: &str, days: u64, factor: f64) -> ScenarioResult {
    let mut result = result(|peer| if peer == Some(Peer::Skysail) { factor } else { 1.0 });
    result.report.commit = Some(commit.to_owned());
    result.report.started = 1_795_567_931 + days * DAY;
    result.scenario.published.push(Published {
        system: "Other <2>".to_owned(),
        source: "A page".to_owned(),
        topology: Topology::BothSidecars,
        access_log: AccessLog::None,
        variant: Variant::Usual,
        rows: vec![PublishedRow {
            connections: Some(16),
            metrics: BTreeMap::from([("latency_p99_us".to_owned(), 3_210.0)]),
        }],
    });
    result
}

/// Writes the site of results. Returns the folder with the site in `site`.
fn site(results: &[ScenarioResult]) -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    for (index, result) in results.iter().enumerate() {
        let place = folder.path().join(format!("results/{index}"));
        fs::create_dir_all(&place).unwrap();
        fs::write(place.join("small.json"), serde_json::to_vec(result).unwrap()).unwrap();
    }
    let place = folder.path().join("site");
    fs::create_dir(&place).unwrap();
    write(&[folder.path().join("results")], &place).unwrap();
    folder
}

fn read(folder: &Path, name: &str) -> String {
    fs::read_to_string(folder.join("site").join(name)).unwrap()
}

#[test]
fn two_results_of_different_commits_have_a_trend_of_each_figure_with_commits_on_the_axis() {
    let folder = site(&[of_commit("aaaaaaaa1111", 0, 1.0), of_commit("bbbbbbbb2222", 2, 1.3)]);
    let page = read(folder.path(), "small.html");
    let (before, trend) = page.split_once("<h3>Trend</h3>").unwrap();
    assert!(!before.contains("Trend: "), "{before}");
    // Four percentiles, and CPU and memory of client and server, in both topologies. Three added percentiles.
    assert_eq!(trend.matches("<svg ").count(), 19, "{trend}");
    for commit in [">aaaaaaaa 11-25</text>", ">bbbbbbbb 11-27</text>"] {
        assert_eq!(trend.matches(commit).count(), 19, "{commit}: {trend}");
    }
    assert_eq!(trend.matches(">commit and date of the result</text>").count(), 19, "{trend}");
    for text in [
        "Trend: both-sidecars",
        ">P99.9 of latency</text>",
        ">Memory of the server's sidecar</text>",
        r#"<span class="key line peer0"></span>skysail, 16 connections</li>"#,
        r#"<span class="key line peer1"></span>envoy, 16 connections</li>"#,
        "Vertical lines: least and greatest value of the rounds.",
    ] {
        assert!(trend.contains(text), "{text}: {trend}");
    }
    assert!(!trend.contains("different processors"), "{trend}");
    // The table has all numbers of connections.
    assert!(trend.contains("<td>both-sidecars, skysail, 2 connections</td><td>P50 µs</td><td>× 1.30</td>"));
}

#[test]
fn a_page_with_one_result_says_that_a_trend_needs_a_second_one() {
    let folder = site(&[of_commit("aaaaaaaa1111", 0, 1.0)]);
    let page = read(folder.path(), "small.html");
    assert!(page.contains("There is one result. A trend needs a second one"), "{page}");
    assert!(!page.contains("Trend: "), "{page}");
    assert!(!page.contains("<script") && !page.contains("http:") && !page.contains("https:"), "{page}");
}

#[test]
fn trends_over_processors_say_so() {
    let mut other = of_commit("bbbbbbbb2222", 1, 1.0);
    other.report.machine.cpu = "y".to_owned();
    let folder = site(&[of_commit("aaaaaaaa1111", 0, 1.0), other]);
    assert!(read(folder.path(), "small.html").contains("The results are of different processors"));
}

#[test]
fn the_index_has_question_machine_commits_main_figure_and_raw_results() {
    let folder = site(&[of_commit("aaaaaaaa1111", 0, 1.0), of_commit("bbbbbbbb2222", 2, 1.0)]);
    let index = read(folder.path(), "index.html");
    for text in [
        r#"<h2><a href="small.html">Small &lt;title&gt;</a></h2><p>What?</p>"#,
        "commit bbbbbbbb2222. Machine: x (2 CPUs), Linux 6",
        "of 2 commits, from the oldest to the newest: aaaaaaaa, bbbbbbbb",
        "both-sidecars, 16 connections",
        "<th>P99 of latency, µs</th>",
        "<td>skysail</td><td>957 (951–963)</td>",
        "<td>envoy</td>",
        "<td>no sidecar</td>",
        "<td>published: Other &lt;2&gt; [2]</td><td>3210</td>",
        "Less is better.",
    ] {
        assert!(index.contains(text), "{text}: {index}");
    }
    let links: Vec<&str> =
        index.split(r#"<a href="data/"#).skip(1).map(|rest| rest.split('"').next().unwrap()).collect();
    assert_eq!(links.len(), 2, "{index}");
    for link in links {
        assert!(folder.path().join("site/data").join(link).is_file(), "{link}");
    }
    let single = read(site(&[of_commit("aaaaaaaa1111", 0, 1.0)]).path(), "index.html");
    assert!(single.contains("Results: 1, of this commit.") && !single.contains("of 2 commits"), "{single}");
}

/// Returns the parts of a page between two texts.
fn between<'a>(page: &'a str, start: &'a str, end: &'a str) -> impl Iterator<Item = &'a str> {
    page.split(start).skip(1).map(move |rest| rest.split(end).next().unwrap())
}

#[test]
fn all_pages_of_the_results_of_the_repository_explain_their_plots() {
    let folder = tempfile::tempdir().unwrap();
    write(&[RESULTS.into()], folder.path()).unwrap();
    let mut pages = 0;
    for entry in fs::read_dir(folder.path()).unwrap() {
        let path = entry.unwrap().path();
        if path.extension().is_none_or(|extension| extension != "html") {
            continue;
        }
        let page = fs::read_to_string(&path).unwrap();
        let name = path.file_name().unwrap().to_string_lossy();
        assert!(!page.contains("NaN") && !page.contains("<script"), "{name}");
        for figure in between(&page, "<figure>", "</figure>") {
            assert!(figure.contains(r#"<ul class="legend"><li>"#), "{name}: {figure}");
            let caption = between(figure, "<figcaption>", "</figcaption>").next().unwrap();
            assert!(caption.contains("least and greatest value of the rounds"), "{name}: {caption}");
            for svg in between(figure, "<svg ", "</svg>") {
                assert!(svg.starts_with(r#"viewBox="0 0 400 "#), "{name}: {svg}");
                assert!(svg.contains(r#"<text class="group" x="0" y="15">"#), "no title: {name}: {svg}");
                assert!(svg.contains(r#"<text class="axis""#), "no title of the axis: {name}: {svg}");
                assert!(svg.matches(r#"<text class="tick""#).count() >= 2, "no ticks: {name}: {svg}");
                assert!(
                    svg.contains(r#"<path class="range""#) || svg.contains(r#"<path class="span "#),
                    "{svg}"
                );
            }
        }
        for class in between(&page, "<rect class=\"", "\"") {
            let is_known = ["peer", "none", "published", "step"].iter().any(|of| class.starts_with(of));
            assert!(is_known, "{name}: {class}");
        }
        if name != "index.html" {
            pages += 1;
            assert!(page.contains("<h3>Terms</h3><dl><dt>"), "{name}");
        }
    }
    assert!(pages > 0);
}
