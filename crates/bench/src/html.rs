//! Parts of self-contained HTML pages, which load no script, font or image.

use std::fmt::Write as _;

use crate::{layout::TextTable, plot::escape, report::Machine, stage};

const STYLE: &str = "
body{font:15px/1.5 system-ui,sans-serif;max-width:1100px;margin:2em auto;padding:0 1em;color:#222;background:#fff}
h1,h2{line-height:1.2}h2{margin-top:2.2em}
.wide{overflow-x:auto}table{border-collapse:collapse;font-size:13px}
th,td{border-bottom:1px solid #ddd;padding:.25em .6em;text-align:right;white-space:nowrap}
th{white-space:normal;vertical-align:bottom}th:first-child,td:first-child,th:nth-child(2),td:nth-child(2){text-align:left}
svg{max-width:100%;height:auto;font:12px system-ui,sans-serif;display:block;margin:.8em 0}
svg text{fill:#333}.group{font-weight:600}.grid{stroke:#ddd}.range{stroke:#000;stroke-width:1.5;fill:none}
.line{fill:none;stroke-width:2}.high{stroke-dasharray:5 4}.dots{stroke-dasharray:1 4}
.user{fill:#4c78a8}.kernel{fill:#b8cbe0}.whole{fill:#4c78a8}
.peer0{--c:#d1495b}.peer1{--c:#2e6f9e}.peer2{--c:#3f8f5b}.peer3{--c:#b07b2c}.peer4{--c:#7a5195}
.peer5{--c:#17869e}.peer6{--c:#8a9a1b}.peer7{--c:#c2577f}.none{--c:#777}
.published0{--c:#8c6d31}.published1{--c:#5254a3}.published2{--c:#843c39}.published3{--c:#31817f}
.published4{--c:#7b4173}.published5{--c:#637939}.published6{--c:#3d6b99}.published7{--c:#a0622d}
.line{stroke:var(--c)}circle{fill:var(--c);stroke:var(--c)}circle.high{stroke-dasharray:none}
.line.published{stroke-width:1.2}circle.published{fill:#fff}
rect.published,rect[class^=peer],rect.none{fill:var(--c)}rect.published{opacity:.45}
.key{display:inline-block;width:1em;height:1em;vertical-align:-.15em;margin:0 .3em 0 1em;background:var(--c)}
.key.user{background:#4c78a8}.key.kernel{background:#b8cbe0}
figure{margin:1.2em 0;break-inside:avoid}figcaption{font-size:13px;color:#555}
@media print{body{max-width:none;margin:0;font-size:11px}.wide{overflow:visible}table{font-size:9px}
th,td{padding:.15em .35em}h2{break-after:avoid}tr{break-inside:avoid}*{print-color-adjust:exact}}
";

/// Returns a page. `title` is text, `body` is HTML.
pub(crate) fn document(title: &str, body: &str) -> String {
    format!(
        "<!doctype html><html lang=\"en\"><head><meta charset=\"utf-8\">\
         <meta name=\"viewport\" content=\"width=device-width\"><title>{}</title>\
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
    }
}
