// Arithmetic on vectors. Rows of `data` (Float32Array) have `width` numbers each.

export function decoded(base64) {
  const text = atob(base64), bytes = new Uint8Array(text.length);
  for (let i = 0; i < text.length; i++) bytes[i] = text.charCodeAt(i);
  return new Float32Array(bytes.buffer);
}

export function normalized(data, width) {
  const unit = new Float32Array(data);
  for (let start = 0; start < unit.length; start += width) {
    let sum = 0;
    for (let i = start; i < start + width; i++) sum += unit[i] * unit[i];
    const scale = sum ? 1 / Math.sqrt(sum) : 0;
    for (let i = start; i < start + width; i++) unit[i] *= scale;
  }
  return unit;
}

export function dot(data, width, a, b) {
  let sum = 0;
  for (let i = 0, x = a * width, y = b * width; i < width; i++) sum += data[x + i] * data[y + i];
  return sum;
}

// The first two principal components of the rows, by power iteration: [[x, y], ...]. The page can draw between the steps.
export async function plane(data, width) {
  const rows = data.length / width, mean = new Float64Array(width);
  for (let i = 0; i < data.length; i++) mean[i % width] += data[i] / rows;
  const axes = [];
  for (let which = 0; which < 2; which++) {
    let axis = Float64Array.from({ length: width }, (_, i) => Math.cos(i * (1.7 + which)));
    for (let step = 0; step < 24; step++) {
      const next = new Float64Array(width);
      for (let row = 0; row < rows; row++) {
        const along = project(data, row * width, mean, axis);
        for (let i = 0, at = row * width; i < width; i++) next[i] += along * (data[at + i] - mean[i]);
      }
      for (const other of axes) {
        let shared = 0;
        for (let i = 0; i < width; i++) shared += next[i] * other[i];
        for (let i = 0; i < width; i++) next[i] -= shared * other[i];
      }
      const length = Math.hypot(...next);
      if (length < 1e-12) break;
      axis = next.map((value) => value / length);
      if (rows > 1000) await new Promise((resolve) => setTimeout(resolve));
    }
    axes.push(axis);
  }
  return Array.from({ length: rows }, (_, row) => axes.map((axis) => project(data, row * width, mean, axis)));
}

function project(data, at, mean, axis) {
  let sum = 0;
  for (let i = 0; i < axis.length; i++) sum += (data[at + i] - mean[i]) * axis[i];
  return sum;
}
