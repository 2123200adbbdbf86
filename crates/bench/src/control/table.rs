//! Formats the result of `skysail bench control` as tables.

use std::fmt::Write as _;

use super::report::{ChangeResult, Churn, ControlReport};
use crate::layout;

impl ControlReport {
    /// Returns the tables in Markdown, with their legend.
    pub(super) fn table(&self) -> String {
        let mut text = layout::tables(
            2,
            &["", if self.settings.istiod { "istiod" } else { "skysaild" }].map(str::to_owned),
            &self.rows(),
        );
        if !self.changes.is_empty() {
            let rows: Vec<_> = self.changes.iter().map(ChangeResult::row).collect();
            // Writing to a String cannot fail.
            let _ = write!(
                text,
                "\n\n{}\n\n{}",
                layout::tables(1, &CHANGES.map(str::to_owned), &rows),
                layout::paragraph(CHANGES_LEGEND)
            );
        }
        if let Some(churn) = &self.churn {
            let head = ["churn".to_owned(), format!("{} % reconnect", churn.percent)];
            let _ = write!(text, "\n\n{}", layout::tables(2, &head, &churn.rows()));
        }
        text
    }

    fn rows(&self) -> Vec<Vec<String>> {
        let Self { settings, connect, .. } = self;
        let each = (connect.resident_mb - self.idle_mb) * 1_024.0 / f64::from(settings.sidecars);
        let rows = [
            ("start to serving".to_owned(), format!("{:.2} s, {:.0} MB", self.start_seconds, self.idle_mb)),
            (
                format!("{} sidecars connected and configured", settings.sidecars),
                format!("{:.0} per second", connect.per_second),
            ),
            ("time for each".to_owned(), connect.ms.text()),
            (
                "CPU for each".to_owned(),
                format!("{:.2} ms (this driver: {:.2} ms)", connect.cpu_ms_each, connect.driver_cpu_ms_each),
            ),
            (
                "sent to each".to_owned(),
                format!("{:.1} kB, {:.0} resources", connect.kilobytes_each, connect.resources_each),
            ),
            (
                "resident memory".to_owned(),
                format!(
                    "{:.0} MB (peak {:.0}; {each:.1} kB per sidecar)",
                    connect.resident_mb, connect.peak_mb
                ),
            ),
            ("resident memory after all have disconnected".to_owned(), format!("{:.0} MB", self.left_mb)),
        ];
        let api_server = self.api_server.map(|load| {
            let value = format!("{:.1} s of CPU, {:.0} MB", load.cpu_seconds, load.resident_mb);
            ("API server meanwhile".to_owned(), value)
        });
        rows.into_iter().chain(api_server).map(|(what, value)| vec![what, value]).collect()
    }
}

const CHANGES: [&str; 9] =
    ["change", "sidecars", "reached", "P50 ms", "P99 ms", "last ms", "worst ms", "CPU ms", "bytes to each"];
const CHANGES_LEGEND: &str = "sidecars: those that must receive the change, also gateways; reached: those that \
    received anything. From the change of the file until a sidecar has it: P50 and P99 of all sidecars and \
    repetitions; last: the last sidecar, median of the repetitions; worst: the last sidecar of the slowest repetition. \
    CPU: of the control plane, median. bytes: for each that was reached.";

impl ChangeResult {
    fn row(&self) -> Vec<String> {
        let time = |ms: f64| if self.sidecars == 0 { "-".to_owned() } else { format!("{ms:.1}") };
        vec![
            self.change.name(),
            self.sidecars.to_string(),
            self.reached.to_string(),
            time(self.ms.p50),
            time(self.ms.p99),
            time(self.last_ms),
            time(self.ms.last),
            format!("{:.1}", self.cpu_ms),
            format!("{:.0}", self.bytes_each),
        ]
    }
}

impl Churn {
    fn rows(&self) -> Vec<Vec<String>> {
        let resident: Vec<String> = self.resident_mb.iter().map(|mb| format!("{mb:.0}")).collect();
        let rows = [
            ("sidecars that reconnect", format!("{:.0} per second", self.per_second)),
            ("time for each", self.ms.text()),
            ("CPU for each", format!("{:.2} ms", self.cpu_ms_each)),
            ("changes meanwhile", self.changes.to_string()),
            ("resident MB by tenths of the time", resident.join(" ")),
        ];
        rows.map(|(what, value)| vec![what.to_owned(), value]).to_vec()
    }
}

#[cfg(test)]
mod tests {
    use super::{
        super::{
            Form, Subscription,
            mesh::{Change, Size},
            report::{ConnectResult, ControlSettings, Quantiles},
        },
        *,
    };
    use crate::stage;

    fn spread(last: f64) -> Quantiles {
        Quantiles { p50: last / 4.0, p99: last / 2.0, last }
    }

    /// A large mesh on a slow machine.
    fn report() -> ControlReport {
        let changes = [Change::Endpoint, Change::RequestAuthentication, Change::Policy, Change::Service];
        let result = |change| ChangeResult {
            change,
            sidecars: 200_000,
            reached: 200_000,
            ms: spread(119_999.9),
            last_ms: 99_999.9,
            cpu_ms: 12_345.6,
            bytes_each: 1_234_567.0,
        };
        ControlReport {
            format: 1,
            benchmark: "control",
            version: "0",
            started: 0,
            machine: stage::machine(None, &Ok(()), None),
            settings: ControlSettings {
                sidecars: 200_000,
                gateways: 3_000,
                mesh: Size::Large,
                services: 60_000,
                namespaces: 10_000,
                endpoints: 250,
                subscribe: Subscription::Mesh,
                used: 10,
                whole_routes: false,
                form: Form::Delta,
                tls: true,
                streams: 16,
                at_once: 1_000,
                kubernetes: false,
                istiod: false,
            },
            start_seconds: 119.99,
            idle_mb: 12_345.0,
            connect: ConnectResult {
                seconds: 600.0,
                per_second: 12_345.0,
                cpu_ms_each: 1_234.56,
                driver_cpu_ms_each: 123.45,
                ms: spread(599_999.9),
                kilobytes_each: 123_456.7,
                resources_each: 180_000.0,
                resident_mb: 65_536.0,
                peak_mb: 131_072.0,
            },
            changes: changes.map(result).into(),
            churn: Some(Churn {
                percent: 100,
                seconds: 3_600.0,
                per_second: 12_345.0,
                cpu_ms_each: 123.45,
                ms: spread(119_999.9),
                changes: 36_000,
                resident_mb: vec![65_536.0; 10],
            }),
            left_mb: 65_536.0,
            api_server: None,
        }
    }

    #[test]
    fn tables_fit_a_terminal() {
        let text = report().table();
        layout::assert_fits(&text);
        for part in [" | 12345 per second", "| endpoint ", "| 100 % reconnect", "| 36000"] {
            assert!(text.contains(part), "{part}: {text}");
        }
        assert!(text.contains("worst: the last sidecar of the"), "{text}");
    }

    #[test]
    fn without_changes_and_churn_there_is_one_table() {
        let text = ControlReport { changes: Vec::new(), churn: None, ..report() }.table();
        assert_eq!(text.lines().filter(|line| line.starts_with("|--")).count(), 1, "{text}");
        assert!(!text.contains("worst"), "{text}");
    }
}
