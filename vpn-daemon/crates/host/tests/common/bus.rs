//! A message bus of our own: the real `dbus-daemon` with a configuration that allows everything.

use std::io::{BufRead as _, BufReader};
use std::path::Path;
use std::process::{Child, Command, Stdio};

pub(crate) struct PrivateBus {
    daemon: Child,
    pub(crate) address: String,
}

impl PrivateBus {
    /// `None` where there is no `dbus-daemon`. Listens in `folder`.
    pub(crate) fn start(folder: &Path) -> Option<Self> {
        let socket = folder.join("system_bus_socket");
        let address = format!("unix:path={}", socket.display());
        let configuration = folder.join("bus.conf");
        std::fs::write(
            &configuration,
            format!(
                r#"<!DOCTYPE busconfig PUBLIC "-//freedesktop//DTD D-Bus Bus Configuration 1.0//EN"
 "http://www.freedesktop.org/standards/dbus/1.0/busconfig.dtd">
<busconfig>
  <type>system</type>
  <listen>{address}</listen>
  <auth>EXTERNAL</auth>
  <policy context="default">
    <allow send_destination="*" eavesdrop="true"/>
    <allow eavesdrop="true"/>
    <allow own="*"/>
    <allow user="*"/>
  </policy>
</busconfig>"#
            ),
        )
        .unwrap();
        let mut daemon = Command::new("dbus-daemon")
            .arg(format!("--config-file={}", configuration.display()))
            .args(["--nofork", "--nopidfile", "--nosyslog", "--print-address=1"])
            .stdout(Stdio::piped())
            .spawn()
            .ok()?;
        // It prints its address once it listens.
        let mut line = String::new();
        BufReader::new(daemon.stdout.take().unwrap()).read_line(&mut line).unwrap();
        assert!(line.starts_with("unix:path="), "{line:?}");
        Some(PrivateBus { daemon, address })
    }

    pub(crate) fn pid(&self) -> u32 {
        self.daemon.id()
    }
}

impl Drop for PrivateBus {
    fn drop(&mut self) {
        let _ = self.daemon.kill();
        let _ = self.daemon.wait();
    }
}
