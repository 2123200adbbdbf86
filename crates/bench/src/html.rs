//! Parts of self-contained HTML pages, which load no script, font or image.

use std::fmt::Write as _;

use crate::{layout::TextTable, plot::escape, report::Machine, stage};

const STYLE: &str = "
body{font:15px/1.5 system-ui,sans-serif;max-width:1100px;margin:1.5em auto;padding:0 .7em;color:#222;background:#fff;
overflow-wrap:break-word}
h1,h2,h3{line-height:1.2}h2{margin-top:2.2em}h3{margin-top:1.8em}
.wide{overflow-x:auto;max-width:100%}table{border-collapse:collapse;font-size:13px}
th,td{border-bottom:1px solid #ddd;padding:.25em .6em;text-align:right;white-space:nowrap}
th{white-space:normal;vertical-align:bottom}th:first-child,td:first-child,th:nth-child(2),td:nth-child(2){text-align:left}
dl{display:grid;grid-template-columns:minmax(5em,max-content) 1fr;gap:.15em 1em;font-size:14px}
dt{font-weight:600;max-width:12em}dd{margin:0;min-width:0}
svg{max-width:100%;height:auto;font:13px system-ui,sans-serif;display:block;margin:.8em 0}
.panels{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,360px),1fr));gap:.4em 2em;align-items:start}
.panels svg{width:100%;max-width:460px}
svg text{fill:#333}.group{font-weight:600}.tick{font-size:12px}.grid{stroke:#ddd}.zero{stroke:#777}
.range{stroke:#000;stroke-width:1.5;fill:none}.span{stroke:var(--c);stroke-width:1.2;fill:none;opacity:.7}
.line{fill:none;stroke-width:2}.high{stroke-dasharray:6 4}.dots{stroke-dasharray:1.5 4}.dashes{stroke-dasharray:12 3 2 3}
.user{fill:#4c78a8}.kernel{fill:#b8cbe0}.whole{fill:#4c78a8}
.peer0{--c:#d1495b}.peer1{--c:#2e6f9e}.peer2{--c:#3f8f5b}.peer3{--c:#b07b2c}.peer4{--c:#7a5195}
.peer5{--c:#17869e}.peer6{--c:#8a9a1b}.peer7{--c:#c2577f}.none{--c:#777}
.step0{--c:#1f4e5f}.step1{--c:#e0a030}.step2{--c:#6d8f3f}.step3{--c:#9c6b98}.step4{--c:#5fa8b8}
.step5{--c:#b5651d}.step6{--c:#a9b665}.step7{--c:#8c8c8c}
.published0{--c:#8c6d31}.published1{--c:#5254a3}.published2{--c:#843c39}.published3{--c:#31817f}
.published4{--c:#7b4173}.published5{--c:#637939}.published6{--c:#3d6b99}.published7{--c:#a0622d}
.line{stroke:var(--c)}circle{fill:var(--c);stroke:var(--c)}circle.high,circle.dots,circle.dashes,.span{stroke-dasharray:none}
.line.published{stroke-width:1.2}circle.published{fill:#fff;stroke-width:1.5}.beyond{fill:#fff;stroke:var(--c);stroke-width:1.5}
rect.published,rect[class^=peer],rect[class^=step],rect.none{fill:var(--c)}rect.published{opacity:.35}
.part1{opacity:.55}.part2{opacity:.28}
.legend{list-style:none;padding:0;margin:.3em 0;display:flex;flex-wrap:wrap;gap:.2em 1.2em;font-size:13px}
.key{display:inline-block;width:1em;height:1em;vertical-align:-.15em;margin:0 .4em 0 0;background:var(--c)}
.key.user{background:#4c78a8}.key.kernel{background:#b8cbe0}
.key.line{width:1.8em;height:0;vertical-align:.25em;background:none;border-top:3px solid var(--c)}
.key.high{border-top-style:dashed}.key.dots{border-top-style:dotted}.key.dashes{border-top-style:double}
.key.published{width:.6em;height:.6em;vertical-align:0;background:#fff;border:2px solid var(--c);border-radius:50%}
figure{margin:1.4em 0;break-inside:avoid}figcaption{font-size:13px;color:#555}.title{font-weight:600;margin:.2em 0}
@media(max-width:480px){dl{grid-template-columns:1fr}dd{margin:0 0 .3em 1em}h2{margin-top:1.4em}
td:first-child{white-space:normal;min-width:6em}}
@media print{body{max-width:none;margin:0;font-size:11px}.wide{overflow:visible}table{font-size:9px}
.panels{grid-template-columns:1fr 1fr}svg{break-inside:avoid}figure{break-inside:auto}h3,.title{break-after:avoid}
th,td{padding:.15em .35em}h2{break-after:avoid}tr{break-inside:avoid}*{print-color-adjust:exact}}
";

/// Returns a page. `title` is text, `body` is HTML.
pub(crate) fn document(title: &str, body: &str) -> String {
    format!(
        "<!doctype html><html lang=\"en\"><head><meta charset=\"utf-8\">\
         <meta name=\"viewport\" content=\"width=device-width,initial-scale=1\"><title>{}</title>\
         <style>{STYLE}</style></head><body>{body}</body></html>\n",
        escape(title)
    )
}

/// Returns a table.
pub(crate) fn table(table: &TextTable) -> String {
    let row = |cells: &[String], tag: &str| {
        let cells = cells.iter().map(|cell| format!("<{tag}>{}</{tag}>", escape(cell)));
        format!("<tr>{}</tr>", cells.collect::<String>())
    };
    let rows: String = table.rows.iter().map(|cells| row(cells, "td")).collect();
    format!(r#"<div class="wide"><table>{}{rows}</table></div>"#, row(&table.head, "th"))
}

/// Returns a list of texts; empty without items.
pub(crate) fn list(items: impl IntoIterator<Item = String>) -> String {
    let mut text = String::new();
    for item in items {
        // Writing to a String cannot fail.
        let _ = write!(text, "<li>{}</li>", escape(&item));
    }
    if text.is_empty() { text } else { format!("<ul>{text}</ul>") }
}

/// Returns a list of terms with their meanings; empty without terms.
pub(crate) fn terms<'a>(items: impl IntoIterator<Item = (&'a str, &'a str)>) -> String {
    let mut text = String::new();
    for (name, meaning) in items {
        // Writing to a String cannot fail.
        let _ = write!(text, "<dt>{}</dt><dd>{}</dd>", escape(name), escape(meaning));
    }
    if text.is_empty() { text } else { format!("<dl>{text}</dl>") }
}

/// Returns the processor, the kernel, the isolation and the load of the machine at the start of a run, as text.
pub(crate) fn machine(machine: &Machine) -> String {
    let Machine { cpu, cpus, kernel, network, scheduling, load, .. } = machine;
    format!("{cpu} ({cpus} CPUs), Linux {kernel}, {network}, {scheduling}; load {load:.1} at the start")
}

/// Formats seconds since 1970 as a date and time in UTC, without seconds.
pub(crate) fn date(seconds: u64) -> String {
    let moment = stage::utc(seconds);
    let (year, month, day) = moment.to_calendar_date();
    let month = u8::from(month);
    format!("{year:04}-{month:02}-{day:02} {:02}:{:02} UTC", moment.hour(), moment.minute())
}

/// Asserts that a page loads nothing, closes its elements, and lacks no figure.
#[cfg(test)]
pub(crate) fn assert_complete(page: &str) {
    for unwanted in ["<script", "src=", "href=", "url(", "@import", "http://", "https://", "NaN", "inf"] {
        assert!(!page.contains(unwanted), "{unwanted}");
    }
    let tags = "svg table tr td th ul li p h2 h3 text figure figcaption div span dl dd dt";
    for tag in tags.split(' ') {
        let open = page.matches(&format!("<{tag}>")).count() + page.matches(&format!("<{tag} ")).count();
        assert_eq!(open, page.matches(&format!("</{tag}>")).count(), "{tag}");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dates_follow_the_calendar() {
        assert_eq!(date(0), "1970-01-01 00:00 UTC");
        assert_eq!(date(951_827_696), "2000-02-29 12:34 UTC");
        assert_eq!(date(1_735_689_599), "2024-12-31 23:59 UTC");
    }

    #[test]
    fn texts_are_escaped() {
        let texts = TextTable { head: vec!["<a>".to_owned()], rows: vec![vec!["b & c".to_owned()]] };
        assert!(table(&texts).contains("<th>&lt;a&gt;</th>") && table(&texts).contains("<td>b &amp; c</td>"));
        assert_eq!(list(["<".to_owned()]), "<ul><li>&lt;</li></ul>");
        assert_eq!(list([]), "");
        assert_eq!(terms([("<", "a & b")]), "<dl><dt>&lt;</dt><dd>a &amp; b</dd></dl>");
        assert_eq!(terms([]), "");
    }

    #[test]
    fn plots_fit_a_telephone_and_tables_scroll_by_themselves() {
        let page = document("x", "");
        for rule in [
            "width=device-width,initial-scale=1",
            ".wide{overflow-x:auto",
            "svg{max-width:100%;height:auto",
            ".legend{list-style:none;padding:0;margin:.3em 0;display:flex;flex-wrap:wrap",
            "minmax(min(100%,360px),1fr)",
        ] {
            assert!(page.contains(rule), "{rule}");
        }
    }
}
