// H5Web as in VS Code and on myhdf5.hdfgroup.org: the whole viewer with one local file, read in the browser.
import "@h5web/app/dist/styles.css";

import { App } from "@h5web/app";
import { H5WasmLocalFileProvider } from "@h5web/h5wasm";
import { useState } from "react";
import { createRoot } from "react-dom/client";

function Page() {
  const [file, setFile] = useState();
  if (!file) {
    return <input type="file" onChange={(event) => setFile(event.target.files[0])} />;
  }
  return (
    <H5WasmLocalFileProvider file={file}>
      <App />
    </H5WasmLocalFileProvider>
  );
}

createRoot(document.getElementById("root")).render(<Page />);
